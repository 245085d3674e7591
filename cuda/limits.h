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

// The compute capability whose attention kernels read a cache of 8 bits.
inline constexpr int kByteCacheCapability = 90;

// Maximum k of products with an 8-bit lhs: with a larger one, sums of (-128)^2 overflow int32. Callers check it: kernels
// see k with padding.
inline constexpr int64_t kMaxKOf8Bits = (1 << 17) - 1;

// Upper bound on the bytes of the partial results of a decode step's attention on any GPU: for each head and split of
// the slots, sums, a maximum and a sum of weights. At least kMinSlots per split; up to kFewSplits, or as many as fill
// kMaxCtas CTAs.
inline constexpr int kMaxAttendSplits = 64;
constexpr int64_t MaxAttendBytes(int64_t batch, int64_t heads, int64_t kv_heads, int64_t head_size,
                                 int64_t reach) {
  constexpr int64_t kMinSlots = 32, kFewSplits = 4, kMaxCtas = 512;
  const int64_t pairs = batch * kv_heads, slots = CeilDiv(reach, kMinSlots);
  int64_t splits = CeilDiv(kMaxCtas, pairs > 0 ? pairs : 1);
  if (splits < kFewSplits) splits = kFewSplits;
  if (splits > slots) splits = slots;
  if (splits > kMaxAttendSplits) splits = kMaxAttendSplits;
  const int64_t bytes = int64_t{sizeof(float)} * batch * heads * splits * (head_size + 2);
  return bytes < kMaxWorkspaceBytes ? bytes : kMaxWorkspaceBytes;
}

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
