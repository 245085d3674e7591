// SPDX-License-Identifier: Apache-2.0
//
// Times choices on the device, as XLA runs them: captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Median microseconds of a product by each of `choices`. A graph has one product for each element of `calls`: give them
// weights that together are too large for L2. Graphs are replayed in turn, so that a change of clocks meets all choices
// alike. The first call does not use PDL. Waits for the device.
cudaError_t TimeChoices(const QuantizedMatmul& problem, const std::vector<Buffers>& calls,
                        const std::vector<Choice>& choices, int device,
                        std::vector<float>* microseconds);

}  // namespace jaxlowbit
