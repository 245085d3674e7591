// SPDX-License-Identifier: Apache-2.0
//
// A row, or token, whose values a CTA rounds to 8 bits: its scale, and the rounding (quantize_rows.cu has the formulas).
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/device/pair.cuh"

namespace jaxlowbit {

inline constexpr int kMaxThreads = 1024;

// The largest value of 8 bits.
template <bool kFloat8>
inline constexpr float kMostValue = kFloat8 ? 448 : 127;

// Bits of magnitudes are in the order of magnitudes, those of NaN last.
__device__ inline uint32_t MagnitudeBits(float value) {
  return __float_as_uint(value) & 0x7fffffff;
}

// The largest value of all threads of the CTA.
__device__ inline uint32_t LargestOfBlock(uint32_t value) {
  __shared__ uint32_t largest[kMaxThreads / 32];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
  __syncthreads();  // those of all warps are there
  value =
      __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? largest[threadIdx.x % 32] : 0);
  return value;
}

// The scale of a row, and what divides by it.
struct Divisor {
  float scale;       // NaN if the row is not finite
  float lift;        // a power of two that keeps remainders away from where float32 ends
  float lifted;      // scale * lift
  float reciprocal;  // of that, rounded to the nearest

  __device__ Divisor(uint32_t largest, float most) {
    constexpr float kLeast = 0x1p-126f, kSmall = 0x1p-60f;
    scale = largest == 0 ? 1 : fmaxf(__fdiv_rn(__uint_as_float(largest), most), kLeast);
    if (largest >= 0x7f800000) scale = __uint_as_float(0x7fc00000);  // infinity, NaN
    lift = scale < kSmall ? 0x1p64f : 1;
    lifted = scale * lift;
    reciprocal = __frcp_rn(lifted);
  }

  // x / scale, rounded to the nearest: the first correction leaves an error below one unit in the last place, from
  // which the second one gives what IEEE 754 asks for (Markstein, 1990). Quotients near 0, whose remainders underflow
  // nevertheless, are 0 in 8 bits whatever their last bits. Of -0 it is 0.
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

// Two values in the low 16 bits. No quotient is so far beyond the largest value that it has to be clipped, but that
// conversions to e4m3 saturate.
template <bool kFloat8>
__device__ uint32_t Round(float low, float high) {
  if constexpr (kFloat8) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  } else {
    constexpr float kInteger = 0x1.8p23f;  // the last bit of sums with it is 1
    return __byte_perm(__float_as_uint(low + kInteger), __float_as_uint(high + kInteger), 0x0040);
  }
}

// Two values as bfloat16, which holds all of 8 bits.
template <bool kFloat8>
__device__ uint32_t RoundWide(float low, float high) {
  if constexpr (kFloat8) {
    const auto codes = static_cast<__nv_fp8x2_storage_t>(Round<true>(low, high));
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
    return Pair<__nv_bfloat16>::Round(values.x, values.y);
  } else {
    return Pair<__nv_bfloat16>::Round(rintf(low), rintf(high));
  }
}

}  // namespace jaxlowbit
