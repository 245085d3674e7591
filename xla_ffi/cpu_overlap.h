// SPDX-License-Identifier: Apache-2.0
//
// XLA may lay the result of a call over its operands, which tasks of the CPU read until the last has ended.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/extents.h"

namespace jaxlowbit {

// Calls run(buffers), whose result is apart from what it reads, and copies it to its place if it was not.
template <typename Run>
void RunApart(const QuantizedMatmul& problem, Buffers buffers, Run run) {
  const auto read = OperandExtents(problem, buffers);
  const Extent out = OutExtent(problem, buffers);
  const bool overlaps = std::any_of(read.begin(), read.end(),
                                    [&](const Extent& operand) { return Overlap(out, operand); });
  std::vector<char> own(overlaps ? out.bytes : 0);
  if (overlaps) buffers.out = own.data();
  run(std::as_const(buffers));
  if (overlaps) std::memcpy(const_cast<void*>(out.data), own.data(), own.size());
}

}  // namespace jaxlowbit
