// SPDX-License-Identifier: Apache-2.0
//
// Selection for qmm_sm90_stream: supported problems, choices and their costs.
#pragma once

#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels/sm90_stream/costs.h"
#include "cuda/kernels/sm90_stream/plan.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90_stream {

// The functions of the kernel table, documented in select/select.cc.
Support SupportsProblem(const QuantizedMatmul& problem, const Device& device);
Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t workspace_bytes);
std::vector<Choice> Choices(const QuantizedMatmul& problem);
Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes);
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs = kCosts);

// CTAs per SM that share its shared memory.
int CtasPerSm(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

LhsPath LhsPathOf(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

// Whether one launch can compute both products, if they have the same lhs, aligned buffers and no bias or residual:
// same format, and no epilogue except units. They may differ in weights and n.
bool MayJoin(const QuantizedMatmul& a, const QuantizedMatmul& b);

// The problem of a launch of both: their channels concatenated, each weight padded to whole strips.
QuantizedMatmul Join(const QuantizedMatmul& a, const QuantizedMatmul& b);

}  // namespace jaxlowbit::sm90_stream
