// SPDX-License-Identifier: Apache-2.0
//
// Limits for callers that allocate workspaces and lower calls.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Maximum number of split-K slices, and maximum size of their partial sums.
inline constexpr int kMaxSplitK = 16;
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{16} << 20;

// Maximum row length of a normalization between products.
inline constexpr int64_t kMaxRmsNormColumns = 16384;

// Limits of a decode step's attention: head size (a multiple of 8), and query heads per key head.
inline constexpr int64_t kMaxAttendHeadSize = 256;
inline constexpr int64_t kMaxAttendShared = 16;

// Maximum number of rows that a call all-reduces over several devices. It does so in one step; for large M, two steps
// send less.
inline constexpr int64_t kMaxExchangeRows = 32;

// Upper bound on the bytes of partial sums of a product with this many rows and columns, over all weights that its rows
// multiply. Tiles cover up to twice the rows and twice the columns.
constexpr int64_t MaxPartialSumsBytes(int64_t rows, int64_t columns) {
  const int64_t bytes =
      2 * int64_t{sizeof(float)} * kMaxSplitK * rows * CeilDiv(columns, kAtom) * kAtom;
  return bytes < kMaxWorkspaceBytes ? bytes : kMaxWorkspaceBytes;
}

}  // namespace jaxlowbit
