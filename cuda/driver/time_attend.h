// SPDX-License-Identifier: Apache-2.0
//
// Attention to a cache, checked and timed.
#pragma once

#include <utility>

namespace jaxlowbit::driver {

// Checks shapes, types, windows, holes, caches that are longer than what is read, and odd places, with NaN in every
// slot that is not seen. Returns how many cases were right and wrong, and prints the wrong ones.
std::pair<int, int> CheckAttend();

// Prints the microseconds of calls from a CUDA graph, over copies of the cache that L2 cannot hold.
void TimeAttend();

}  // namespace jaxlowbit::driver
