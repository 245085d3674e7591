// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90 {

// Loads the instances on the current device, and finds out how many clusters it runs at a time.
cudaError_t Prepare(Device& device);

// Enqueues the product and, with split_k > 1, the kernel that reduces the stream-K tail.
cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                   const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit::sm90
