// SPDX-License-Identifier: Apache-2.0
//
// Adds the partial sums of split-K.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gpu.h"
#include "cuda/problem.h"

namespace jaxlowbit {

cudaError_t PrepareReduceSplits();

// Enqueues out[batch * m, columns] = epilogue(sum over splits of the workspace), where the workspace is
// [splits, batch * m, weights_per_element * (columns padded to atoms)].
cudaError_t LaunchReduceSplits(const QuantizedMatmul& problem, const Buffers& buffers, int split_k,
                               const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
