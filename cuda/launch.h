// SPDX-License-Identifier: Apache-2.0
//
// Host interface of the kernels: prepare them once per device, load plans (plan.h), then run their steps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Reads the properties of `device` (a CUDA ordinal) that the selection needs, loads the auxiliary kernels, and looks up
// measured choices by the device's name (select/tuned.h). Thread-safe. Later calls return immediately, or retry after a
// failure. Must not run first during stream capture.
cudaError_t PrepareKernels(int device);

// Finds the device of a stream, which PrepareKernels prepares first if `prepares`. `ordinal`: its CUDA ordinal; -1 if the
// stream cannot be asked. (XLA's ordinals count only the devices that XLA was told to use.)
cudaError_t FindTarget(cudaStream_t stream, bool prepares, int* ordinal, Target* target);

// Properties of `device` that PrepareKernels read.
const Device& DeviceInfo(int device);

// A step of a plan, loaded on one device. Immutable: several threads may run it at once.
class LoadedStep {
 public:
  virtual ~LoadedStep() = default;

  // Enqueues the step. `pointers`: of the call's buffers, which its addresses number. Only launches: it does not
  // allocate device memory, synchronise or query the device, so it can be captured into a graph.
  virtual cudaError_t Run(void* const* pointers, cudaStream_t stream) const = 0;
};

// The pointer to an address.
inline void* PointerTo(const Address& address, void* const* pointers) {
  if (address == nullptr) return nullptr;
  return static_cast<char*>(pointers[address.buffer]) + address.offset;
}

// Loads the kernels of steps on a device. This may compile for seconds and may allocate device memory.
cudaError_t LoadSteps(const std::vector<PlannedStep>& plan, const Device& device,
                      std::vector<std::unique_ptr<const LoadedStep>>* steps);

// Starts compiling the kernels of steps that are probably needed on the current device, if any. `plan` makes the steps
// for a device. Never fails.
void StartCompiling(const std::function<std::vector<PlannedStep>(const Target&)>& plan);

// Plans, loads and enqueues one product, at any address. The driver's entry point: it is planned anew in each call.
cudaError_t LaunchProduct(const Operands& product, int64_t workspace_bytes, int device,
                          cudaStream_t stream);

// Enqueues a product by an explicit choice (the autotuner's entry point). The product must be within the limits of a
// launch, its operands aligned as the problem says, and its result must not overlap them.
cudaError_t LaunchChoice(const QuantizedMatmul& problem, const Buffers& buffers,
                         const Choice& choice, int device, cudaStream_t stream);

// Loads the kernels that LaunchChoice would launch for these choices.
cudaError_t LoadChoices(const QuantizedMatmul& problem, const std::vector<Choice>& choices,
                        int device);

}  // namespace jaxlowbit
