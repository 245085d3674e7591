// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch (PDL; sm_90 and up, nothing before): a kernel launched with the attribute may start
// while the previous kernel in the stream still runs (kernels/launch_config.h).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

#include <cstdint>

namespace jaxlowbit {

// Lets the next kernel start once every CTA has called this or ended. Makes no writes visible.
__device__ inline void LaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Waits until the previous kernels have ended and their writes are visible.
__device__ inline void WaitForPreviousKernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// Waits likewise, once `ready` has been computed. ptxas moves computations behind a plain wait if only later code uses
// them, and each instruction there delays all later kernels. Both branches wait.
__device__ inline void WaitForPreviousKernels([[maybe_unused]] uint32_t ready) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred nonzero;\n"
      "setp.ne.u32 nonzero, %0, 0;\n"
      "@nonzero griddepcontrol.wait;\n"
      "@!nonzero griddepcontrol.wait;\n"
      "}\n" ::"r"(ready)
      : "memory");
#endif
}

// For `ready`: depends on an address.
__device__ inline uint32_t LowWord(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address));
}

}  // namespace jaxlowbit
