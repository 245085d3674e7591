// SPDX-License-Identifier: Apache-2.0
//
// Attention to a cache, checked and timed.
#pragma once

#include <cstdint>
#include <utility>

namespace jaxlowbit::check {

// Checks one in `stride` cases of shapes, types, windows, holes, caches longer than `reach`, and unaligned buffers,
// with NaN in every slot that is not seen. Returns the numbers of right and wrong cases, and prints the wrong ones.
std::pair<int, int> CheckAttend(uint64_t stride);

// Prints the microseconds of calls from a CUDA graph, over copies of the cache that L2 cannot hold.
void TimeAttend();

}  // namespace jaxlowbit::check
