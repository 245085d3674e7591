// SPDX-License-Identifier: Apache-2.0
//
// Checks and times the router of a mixture of experts (ops/route_choices.h).
#pragma once

#include <cstdint>
#include <utility>

namespace jaxlowbit::check {

// Checks every `stride`-th case of sizes, types, unaligned routers, equal logits and NaN: experts exactly, weights by
// float64, and that a second launch gives the same bits. Prints wrong cases. Returns the numbers of correct and wrong
// cases.
std::pair<int, int> CheckRoute(uint64_t stride);

// Prints microseconds of the kernel in a CUDA graph.
void TimeRoute();

}  // namespace jaxlowbit::check
