// SPDX-License-Identifier: Apache-2.0
//
// Division by a number that is known at launch (kernels/params.h makes dividers).
#pragma once

#include <cstdint>

namespace jaxlowbit {

// Divides numbers whose product with the divisor stays below 2^31. `magic`: 2^31 / divisor, rounded up.
struct Divider {
  int divisor;
  uint32_t magic;

  __device__ int Divide(int x) const { return static_cast<int>(__umulhi(2 * x, magic)); }
  __device__ int Remainder(int x) const { return x - Divide(x) * divisor; }
};

// Divides every number from 0 on, at a few instructions more. `magic`: 2^63 / divisor, rounded up.
struct WideDivider {
  int divisor;
  uint64_t magic;

  __device__ int Divide(int x) const {
    return static_cast<int>(__umul64hi(2 * static_cast<uint64_t>(x), magic));
  }
};

}  // namespace jaxlowbit
