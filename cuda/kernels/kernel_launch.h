// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/gpu.h"
#include "cuda/plan.h"

namespace jaxlowbit {

// A kernel loaded on one device, with its grid and its parameters except pointers. Immutable, since several threads may
// launch it at once: each launch fills in a copy of the parameters.
class KernelLaunch {
 public:
  virtual ~KernelLaunch() = default;

  // Enqueues the kernel, and one that adds its partial sums if there are any. `products`: the buffers of each product.
  virtual cudaError_t Launch(const Buffers* products, cudaStream_t stream) const = 0;
};

// Makes the launch of a kMultiply step. Every kernel has such a function.
using LoadLaunch = cudaError_t (*)(const PlannedStep& step, const Device& device,
                                   std::unique_ptr<const KernelLaunch>* launch);

}  // namespace jaxlowbit
