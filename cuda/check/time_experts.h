// SPDX-License-Identifier: Apache-2.0
//
// Checks and times the kernels around the products of a mixture of experts (ops/group_choices.h, ops/combine_choices.h,
// and time_route.h).
#pragma once

#include <cstdint>
#include <utility>

namespace jaxlowbit::check {

// Checks every `stride`-th case of sizes, offsets, experts that are not local, types and unaligned rows. Prints wrong
// cases. Returns the numbers of correct and wrong cases.
std::pair<int, int> CheckExperts(uint64_t stride);

// Prints microseconds of the kernels in a CUDA graph.
void TimeExperts();

}  // namespace jaxlowbit::check
