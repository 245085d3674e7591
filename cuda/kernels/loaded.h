// SPDX-License-Identifier: Apache-2.0
//
// Loads kernel instances per device on first use: from this library if compiled ahead of time, else by JIT compilation
// (cuda/jit/compiler.h).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/gpu.h"
#include "cuda/kernels/instance_key.h"

namespace jaxlowbit {

// Returns the function to launch on a device. A loaded instance is one table lookup; the first call may compile for
// seconds. May be called while a stream is being captured. Only compiler failures are cached.
cudaError_t KernelOn(const Device& device, const InstanceKey& key, const void** function);

// Starts compiling an instance in the background unless it is prebuilt. `architecture`: Device::architecture.
void StartCompiling(const InstanceKey& key, int architecture);

// Returns and clears the message of this thread's last failed KernelOn; empty if it succeeded.
std::string PopLoadError();

// Whether the instance was compiled ahead of time.
bool IsAheadOfTime(const InstanceKey& key);

// Number of instances that this process has loaded, by origin, summed over devices.
struct LoadCounts {
  int ahead_of_time = 0, compiled = 0, cached = 0;
};
LoadCounts CountLoaded();

}  // namespace jaxlowbit
