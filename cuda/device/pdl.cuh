// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch (PDL; sm_90 and up, nothing before): a kernel launched with the attribute may start
// while the previous kernel in the stream still runs (kernels/launch_config.h).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

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

}  // namespace jaxlowbit
