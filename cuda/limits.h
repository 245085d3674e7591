// SPDX-License-Identifier: Apache-2.0
//
// Limits that are part of the contract with whoever allocates workspaces and lowers calls.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// The most slices that split-K divides k into, and the most memory that their partial sums take.
inline constexpr int kMaxSplitK = 16;
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{16} << 20;

// The longest row that is normalized between products.
inline constexpr int64_t kMaxRmsNormColumns = 16384;

// The most rows whose parts a call adds over several devices, which it does in one step; for many rows an all-reduce in
// two steps sends less.
inline constexpr int64_t kMaxExchangeRows = 32;

// The most bytes of partial sums of a product of so many rows and columns, over all weights that its rows multiply.
// Tiles cover up to twice the rows, and up to twice the columns.
constexpr int64_t MostSumsBytes(int64_t rows, int64_t columns) {
  const int64_t bytes =
      2 * int64_t{sizeof(float)} * kMaxSplitK * rows * CeilDiv(columns, kAtom) * kAtom;
  return bytes < kMaxWorkspaceBytes ? bytes : kMaxWorkspaceBytes;
}

}  // namespace jaxlowbit
