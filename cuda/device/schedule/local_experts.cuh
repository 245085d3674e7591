// SPDX-License-Identifier: Apache-2.0
//
// The experts of this device, of a mixture whose experts are divided among several.
#pragma once

#include <cstdint>

namespace jaxlowbit {

// The numbers of local experts, [first, first + experts), without those below 0.
class LocalExperts {
 public:
  // `offset`: the number of the first one, in memory; null: 0.
  __device__ LocalExperts(int experts, const int32_t* offset) : experts_(experts), first_(0) {
    constexpr int kLargest = 0x7fffffff;
    if (offset != nullptr) first_ = min(max(*offset, -experts), kLargest - experts);
  }

  // The position of a local expert; `experts` for others.
  __device__ int Position(int expert) const {
    const bool local = expert >= max(first_, 0) && expert < first_ + experts_;
    return local ? expert - first_ : experts_;
  }

 private:
  const int experts_;
  int first_;
};

}  // namespace jaxlowbit
