// SPDX-License-Identifier: Apache-2.0
//
// A row, or token, whose values a CTA rounds to 8 bits: its scale, and the rounding (quantize_rows.cu has the formulas).
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/device/rounding.cuh"

namespace jaxlowbit {

inline constexpr int kMaxThreads = 1024;

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

}  // namespace jaxlowbit
