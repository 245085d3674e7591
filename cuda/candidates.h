// SPDX-License-Identifier: Apache-2.0
//
// The choices there are, for whom measures them or checks their results. Pure, like dispatch.h.
#pragma once

#include <vector>

#include "cuda/dispatch.h"
#include "cuda/problem.h"

namespace jaxlowbit {

// Every choice of `kernel` that supports the problem; none where the kernel does not.
std::vector<Choice> AllChoices(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes);

// The choices worth measuring: first that of the cost model, then of each kernel those of least
// cost, as far as the model may be wrong. Requires what Select does.
std::vector<Choice> Candidates(const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes);

}  // namespace jaxlowbit
