// SPDX-License-Identifier: Apache-2.0
//
// The sum of squares of a row, in one order for every kernel that normalizes rows, so that all give the same bits: a
// thread adds the squares of its vectors in order, the lanes of a warp add theirs by a butterfly, and so do the warps of
// the row. Thread t has the vectors t and t + kMaxSquaresThreads.
#pragma once

namespace jaxlowbit {

inline constexpr int kSquaresElements = 8;  // of a vector
inline constexpr int kMaxSquaresThreads = 1024;

// Warps of a row of `vectors` vectors.
__host__ __device__ constexpr int SquaresWarps(int vectors) {
  const int warps = (vectors + 31) / 32;
  return warps < kMaxSquaresThreads / 32 ? warps : kMaxSquaresThreads / 32;
}

// The sum over the lanes of a warp, in all of them.
__device__ inline float SumOfLanes(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  return value;
}

}  // namespace jaxlowbit
