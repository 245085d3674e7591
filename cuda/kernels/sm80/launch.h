// SPDX-License-Identifier: Apache-2.0
//
// Launches qmm_sm80, and qmm_sm80_transposed for transposed problems: they share their geometry and parameters.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm80 {

// Loads an instance of either kernel on the current device.
cudaError_t Load(const void* function);

// Enqueues the product and, with split_k > 1, the kernel that adds its partial sums.
cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                   const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit::sm80
