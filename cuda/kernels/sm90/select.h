// SPDX-License-Identifier: Apache-2.0
//
// The decision of qmm_sm90: what it supports, which choices it has, and what they cost.
#pragma once

#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels/sm90/costs.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90 {

// The interface of the table in select/select.cc, which says what each function is for.
Support SupportsProblem(const QuantizedMatmul& problem, const Device& device);
Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t workspace_bytes);
std::vector<Choice> Choices(const QuantizedMatmul& problem);
Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes);
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs = kCosts);

}  // namespace jaxlowbit::sm90
