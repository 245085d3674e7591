// SPDX-License-Identifier: Apache-2.0
//
// Loads entries of Buffers::permutation, several at a time.
#pragma once

#include <cstdint>

namespace jaxlowbit {

// kCount elements, aligned for 16-byte copies, or for a single copy if smaller.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Vector {
  T at[kCount];
};

// Loads the lhs columns of the stored rows `first` to first + kCount - 1; `first` is a multiple of kCount. `part`: rows
// per shard; the permutation stays within each shard.
template <int kCount>
__device__ inline void LoadColumns(const int32_t* permutation, int first, int part,
                                   int (&columns)[kCount]) {
  const auto order = *reinterpret_cast<const Vector<int32_t, kCount>*>(permutation + first);
  int start = first / part * part;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i == start + part) start += part;
    columns[i] = start + min(max(order.at[i], 0), part - 1);
  }
}

}  // namespace jaxlowbit
