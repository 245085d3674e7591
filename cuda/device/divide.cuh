// SPDX-License-Identifier: Apache-2.0
//
// Division by numbers known at launch, by multiplication (kernels/params.h computes the constants).
#pragma once

#include <cstdint>

namespace jaxlowbit {

// For numbers x with x * divisor < 2^31. `magic`: 2^31 / divisor, rounded up.
struct Divider {
  int divisor;
  uint32_t magic;

  __device__ int Divide(int x) const { return static_cast<int>(__umulhi(2 * x, magic)); }
  __device__ int Remainder(int x) const { return x - Divide(x) * divisor; }
};

// For all nonnegative numbers, with a few more instructions. `magic`: 2^63 / divisor, rounded up.
struct WideDivider {
  int divisor;
  uint64_t magic;

  __device__ int Divide(int x) const {
    return static_cast<int>(__umul64hi(2 * static_cast<uint64_t>(x), magic));
  }
};

}  // namespace jaxlowbit
