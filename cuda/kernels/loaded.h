// SPDX-License-Identifier: Apache-2.0
//
// Instances on devices: each is loaded when it is first needed, from this library if it was compiled ahead of time, or
// else compiled where it runs (cuda/jit/compiler.h).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/gpu.h"
#include "cuda/kernels/instance_key.h"

namespace jaxlowbit {

// What to launch on a device. Once it is loaded, that is one look into a table; before, it may compile for seconds,
// and works while a stream is captured, too. A failure is not remembered, except that of a compiler.
cudaError_t KernelOn(const Device& device, const InstanceKey& key, const void** function);

// Begins to compile an instance unless it was compiled ahead of time. `architecture`: Device::architecture.
void StartCompiling(const InstanceKey& key, int architecture);

// Why the last KernelOn of this thread failed, besides its error; empty if it did not. Forgets it.
std::string TakeLoadError();

// Whether the instance was compiled ahead of time.
bool IsAheadOfTime(const InstanceKey& key);

// Instances that this process has loaded, by where they come from; each device counts.
struct LoadCounts {
  int ahead_of_time = 0, compiled = 0, cached = 0;
};
LoadCounts CountLoaded();

}  // namespace jaxlowbit
