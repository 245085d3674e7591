// SPDX-License-Identifier: Apache-2.0
//
// Quantization of rows (tokens) to 8 bits: scale, division, and values as bfloat16. Formulas:
// cuda/ops/quantize_rows.cu.
#pragma once

#include <cstdint>

#include "cuda/device/pair.cuh"

namespace jaxlowbit {

// The largest 8-bit value.
template <bool kFloat8>
inline constexpr float kMaxValue = kFloat8 ? 448 : 127;

// The bits of a magnitude, which order like magnitudes; NaN comes last.
__device__ inline uint32_t MagnitudeBits(float value) {
  return __float_as_uint(value) & 0x7fffffff;
}

// The scale of a row, and the division by it.
struct Divisor {
  float scale;       // NaN if the row is not finite
  float lift;        // a power of two that keeps remainders from underflowing
  float lifted;      // scale * lift
  float reciprocal;  // 1 / lifted, rounded to nearest

  __device__ Divisor(uint32_t largest, float max_value) {
    constexpr float kMinScale = 0x1p-126f, kSmall = 0x1p-60f;
    scale = largest == 0 ? 1 : fmaxf(__fdiv_rn(__uint_as_float(largest), max_value), kMinScale);
    if (largest >= 0x7f800000) scale = __uint_as_float(0x7fc00000);  // infinity, NaN
    lift = scale < kSmall ? 0x1p64f : 1;
    lifted = scale * lift;
    reciprocal = __frcp_rn(lifted);
  }

  // x / scale, rounded to nearest. The first correction leaves an error below one unit in the last place; the second
  // yields the result of IEEE 754 (Markstein, 1990). Quotients near 0, whose remainders may still underflow, are 0 in 8
  // bits in any case. Returns 0 for x = -0.
  __device__ float Quotient(float x) const {
    x *= lift;
    float quotient = x * reciprocal;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      quotient = fmaf(fmaf(-quotient, lifted, x), reciprocal, quotient);
    }
    return quotient;
  }
};

// Rounds two values to 8 bits and returns them as bfloat16, which represents all of them. Conversions to e4m3 saturate
// and need sm_89.
template <bool kFloat8>
__device__ uint32_t RoundWide(float low, float high) {
  if constexpr (kFloat8) {
    uint32_t halves = 0;
#if __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 codes;\n"
        "cvt.rn.satfinite.e4m3x2.f32 codes, %1, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, codes;\n"
        "}\n"
        : "=r"(halves)
        : "f"(high), "f"(low));
#endif
    return Pair<__nv_bfloat16>::Round(Pair<__half>::Low(halves), Pair<__half>::High(halves));
  } else {
    constexpr float kInteger = 0x1.8p23f;  // adding it rounds to an integer
    return Pair<__nv_bfloat16>::Round((low + kInteger) - kInteger, (high + kInteger) - kInteger);
  }
}

}  // namespace jaxlowbit
