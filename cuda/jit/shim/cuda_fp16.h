// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the toolkit's header: the parts that kernels use.
#pragma once
struct __half {
  unsigned short bits;
  __half() = default;
  __half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
inline __half __ushort_as_half(unsigned short bits) {
  __half half;
  half.bits = bits;
  return half;
}
inline float __half2float(__half half) { return half; }
