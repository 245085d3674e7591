// SPDX-License-Identifier: Apache-2.0
//
// Division by what is known at launch.
#pragma once

#include <cstdint>

namespace jaxlowbit {

// For numbers whose product with the divisor stays below 2^31.
struct Divider {
  int divisor;
  uint32_t magic;

  static Divider By(int64_t divisor) {
    return {static_cast<int>(divisor),
            static_cast<uint32_t>(((int64_t{1} << 31) + divisor - 1) / divisor)};  // rounded up
  }
  __device__ int Divide(int x) const { return static_cast<int>(__umulhi(2 * x, magic)); }
  __device__ int Remainder(int x) const { return x - Divide(x) * divisor; }
};

// For all numbers from 0 on, at a few instructions more.
struct WideDivider {
  int divisor;
  uint64_t magic;

  static WideDivider By(int64_t divisor) {
    return {static_cast<int>(divisor), ((uint64_t{1} << 63) + static_cast<uint64_t>(divisor) - 1) /
                                           static_cast<uint64_t>(divisor)};
  }
  __device__ int Divide(int x) const {
    return static_cast<int>(__umul64hi(2 * static_cast<uint64_t>(x), magic));
  }
};

}  // namespace jaxlowbit
