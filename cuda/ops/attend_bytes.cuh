// SPDX-License-Identifier: Apache-2.0
//
// Converts 8-bit elements of the cache to pairs for tensor cores. Exact, but for the division by kDivisor.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/device/pair.cuh"

namespace jaxlowbit::attend {

__device__ inline uint32_t Bits(__nv_bfloat162 pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline uint32_t Bits(__half2 pair) { return reinterpret_cast<const uint32_t&>(pair); }

template <typename Pair>
__device__ Pair AsPair(uint32_t bits) {
  return reinterpret_cast<const Pair&>(bits);
}

// The elements kLow and kHigh of a word of four, as a pair of T.
template <typename T, typename C, int kLow, int kHigh>
struct Widen;

template <int kLow, int kHigh>
struct Widen<__nv_bfloat16, int8_t, kLow, kHigh> {
  static constexpr float kDivisor = 64;
  // The bits of 128 + x are a subnormal or small number, (128 + x) 2^-133. Times 2^127, minus 2: x / 64.
  static __device__ uint32_t Of(uint32_t word) {
    using P = Pair<__nv_bfloat16>;
    static_assert(kSubnormalUnit<__nv_bfloat16> == -133);
    const uint32_t bits = __byte_perm(word ^ 0x80808080, 0, 0x4040 | kHigh << 8 | kLow);
    return P::Fma(bits, PowersOfTwo<__nv_bfloat16>(127),
                  kNegativeZeros | PowersOfTwo<__nv_bfloat16>(1));
  }
};

template <int kLow, int kHigh>
struct Widen<__half, int8_t, kLow, kHigh> {
  static constexpr float kDivisor = 1;
  // (1024 + 128 + x) - 1152.
  static __device__ uint32_t Of(uint32_t word) {
    const uint32_t sum = __byte_perm(word ^ 0x80808080, 0x64646464, 0x4040 | kHigh << 8 | kLow);
    return Bits(__hsub2(AsPair<__half2>(sum), AsPair<__half2>(0x64806480)));
  }
};

// The bits of e4m3 as the upper bits of T's exponent and mantissa; the product corrects the bias, also of subnormals.
template <int kLow, int kHigh>
struct Widen<__nv_bfloat16, __nv_fp8_e4m3, kLow, kHigh> {
  static constexpr float kDivisor = 1;
  static __device__ uint32_t Of(uint32_t word) {
    const uint32_t bytes = __byte_perm(word, 0, 0x0404 | kHigh << 12 | kLow << 4);
    const uint32_t bits = (bytes & 0x80008000) | (bytes >> 4 & 0x07f007f0);
    return Bits(__hmul2(AsPair<__nv_bfloat162>(bits), AsPair<__nv_bfloat162>(0x7b807b80)));
  }
};

template <int kLow, int kHigh>
struct Widen<__half, __nv_fp8_e4m3, kLow, kHigh> {
  static constexpr float kDivisor = 1;
  static __device__ uint32_t Of(uint32_t word) {
    const uint32_t bytes = __byte_perm(word, 0, 0x0404 | kHigh << 12 | kLow << 4);
    const uint32_t bits = (bytes & 0x80008000) | (bytes >> 1 & 0x3f803f80);
    return Bits(__hmul2(AsPair<__half2>(bits), AsPair<__half2>(0x5c005c00)));
  }
};

}  // namespace jaxlowbit::attend
