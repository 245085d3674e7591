// SPDX-License-Identifier: Apache-2.0
//
// Selection for qmm_sm90: supported problems, choices and their costs.
#pragma once

#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels/sm90/costs.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90 {

// The functions of the kernel table, documented in select/select.cc.
Support SupportsProblem(const QuantizedMatmul& problem, const Device& device);
Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t workspace_bytes);
std::vector<Choice> Choices(const QuantizedMatmul& problem);
Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes);
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs = kCosts);

}  // namespace jaxlowbit::sm90
