// SPDX-License-Identifier: Apache-2.0
//
// The decision of qmm_sm90_stream: what it supports, which choices it has, and what they cost.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels/sm90_stream/costs.h"
#include "cuda/kernels/sm90_stream/plan.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90_stream {

// The interface of the table in select/select.cc, which says what each function is for.
Support SupportsProblem(const QuantizedMatmul& problem, const Device& device);
Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t workspace_bytes);
std::vector<Choice> Choices(const QuantizedMatmul& problem);
Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes);
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs = kCosts);

// CTAs of a multiprocessor that a choice divides shared memory among.
int CtasPerSm(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

// How a choice brings activations to shared memory.
LhsWay WayOfLhs(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

// Whether one launch may compute both products: they read the same lhs, have no epilogue but units, differ in weights
// and n alone, and are aligned.
bool MayJoin(const Operands& a, const Operands& b);

// Such products as one problem: the channels of all of them, each weight in strips of its own.
QuantizedMatmul Join(const Operands* products, size_t count);

}  // namespace jaxlowbit::sm90_stream
