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

// Limits of the router of a decode step: experts, a power of two; choices of a token; and CTAs, among which the columns of
// x are divided.
inline constexpr int kMinRoutedExperts = 8, kMaxRoutedExperts = 512;
inline constexpr int kMaxRoutedChoices = 32;
inline constexpr int kRouteCtas = 8;

// The compute capability whose kernels route tokens, and group and combine their choices.
inline constexpr int kRouteCapability = 90;

// Returns "" if the kernel routes tokens of these sizes on GPUs of a compute capability, else the reason.
constexpr const char* UnsupportedRoute(int64_t columns, int64_t experts, int64_t top,
                                       int compute_capability) {
  if (compute_capability != kRouteCapability) {
    return "the router's kernel runs on compute capability 9.0";
  }
  if (columns < kRouteCtas || columns > kMaxRmsNormColumns || columns % kRouteCtas != 0) {
    return "the router's kernel takes rows of a multiple of 8 up to 16384 elements";
  }
  if (experts < kMinRoutedExperts || experts > kMaxRoutedExperts ||
      (experts & (experts - 1)) != 0) {
    return "the router's kernel takes a power of two from 8 to 512 of experts";
  }
  if (top < 1 || top > kMaxRoutedChoices || top > experts) {
    return "the router's kernel takes from 1 to 32 choices of a token, of different experts";
  }
  return "";
}

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
