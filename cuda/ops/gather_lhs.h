// SPDX-License-Identifier: Apache-2.0
//
// Permutes the columns of lhs to the order of a weight's stored rows.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gpu.h"
#include "cuda/problem.h"

namespace jaxlowbit {

cudaError_t PrepareGatherLhs(const Device& device);

// Enqueues buffers.gathered = permuted lhs. Requires permuted parts and a product that is not transposed.
cudaError_t LaunchGatherLhs(const QuantizedMatmul& problem, const Buffers& buffers,
                            const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
