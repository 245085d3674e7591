// SPDX-License-Identifier: Apache-2.0
//
// Quantization of a row (token) by a CTA: the maximum and the rounding. Formulas: quantize_rows.cu.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/device/rounding.cuh"

namespace jaxlowbit {

inline constexpr int kMaxThreads = 1024;

// Maximum over the threads of the CTA.
__device__ inline uint32_t BlockMax(uint32_t value) {
  __shared__ uint32_t largest[kMaxThreads / 32];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
  __syncthreads();  // the maxima of all warps are stored
  value =
      __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? largest[threadIdx.x % 32] : 0);
  return value;
}

// Two 8-bit values in the low 16 bits. Quotients need no clipping: they exceed the maximum by rounding errors only, and
// conversions to e4m3 saturate.
template <bool kFloat8>
__device__ uint32_t Round(float low, float high) {
  if constexpr (kFloat8) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  } else {
    constexpr float kInteger = 0x1.8p23f;  // adding it rounds to an integer
    return __byte_perm(__float_as_uint(low + kInteger), __float_as_uint(high + kInteger), 0x0040);
  }
}

}  // namespace jaxlowbit
