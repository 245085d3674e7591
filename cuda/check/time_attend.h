// SPDX-License-Identifier: Apache-2.0
//
// Checks and times attention.
#pragma once

#include <cstdint>
#include <utility>

namespace jaxlowbit::check {

// Checks every `stride`-th case of shapes, types, windows, holes, caches longer than `reach`, and unaligned buffers,
// with NaN in all masked slots. Prints wrong cases. Returns the numbers of correct and wrong cases.
std::pair<int, int> CheckAttend(uint64_t stride);

// Prints microseconds per call in a CUDA graph, over more copies of the cache than L2 can hold.
void TimeAttend();

}  // namespace jaxlowbit::check
