// SPDX-License-Identifier: Apache-2.0
//
// XLA may let a call's result overlap its operands, but CPU tasks read operands until the last task ends.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/extents.h"

namespace jaxlowbit {

// Calls run(buffers). If the result overlaps operands, `run` writes to a temporary buffer, which is then copied.
template <typename Run>
void RunWithoutOverlap(const QuantizedMatmul& problem, Buffers buffers, Run run) {
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
