// SPDX-License-Identifier: Apache-2.0
//
// Selection for qmm_sm80 and qmm_sm80_transposed: supported problems, choices, and costs.
#pragma once

#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels/sm80/costs.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm80 {

// The functions of the table in select/select.cc, which documents them.
Support SupportsProblem(const QuantizedMatmul& problem, const Device& device);
Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t workspace_bytes);
std::vector<Choice> Choices(const QuantizedMatmul& problem);
Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes);
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs = kCosts);

// Tiles along the columns of out. A tile of a gated product is a strip of the gate and the same strip of up.
int64_t OutTiles(const QuantizedMatmul& problem);

// Shared memory of a CTA.
int SharedBytesOf(const QuantizedMatmul& problem, int block_m);

}  // namespace jaxlowbit::sm80
