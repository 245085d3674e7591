// SPDX-License-Identifier: Apache-2.0
//
// Attention to a cache, checked and timed.
#pragma once

#include <cstdint>
#include <utility>

namespace jaxlowbit::check {

// Checks shapes, types, windows, holes, caches that are longer than what is read, and odd places, with NaN in every
// slot that is not seen, of one in `stride` cases. Returns how many were right and wrong, and prints the wrong ones.
std::pair<int, int> CheckAttend(uint64_t stride);

// Prints the microseconds of calls from a CUDA graph, over copies of the cache that L2 cannot hold.
void TimeAttend();

}  // namespace jaxlowbit::check
