// SPDX-License-Identifier: Apache-2.0
//
// Choices, and answers, that were found before. Programs multiply the same few shapes again and again, and a choice is a
// function of the problem, the device and the table of measured choices alone.
#pragma once

#include "cuda/select/select.h"

namespace jaxlowbit {

// What Select returns. The first call for a problem asks it; later ones, on any thread, find its answer, as long as no
// more than a few thousand different problems are in between. Another table is another question.
Choice SelectCached(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
                    const TunedTable* tuned = nullptr);

// What Supports(kernel, problem, device) returns, likewise: it costs as much as a choice.
Support SupportsCached(Kernel kernel, const QuantizedMatmul& problem, const Device& device);

// What Supports(problem, device) returns, likewise: for scales of two levels it costs as much.
Support SupportsCached(const QuantizedMatmul& problem, const Device& device);

}  // namespace jaxlowbit
