// SPDX-License-Identifier: Apache-2.0
//
// Weights for instructions that multiply 8 bits: operand A of m64nNk32, which takes four neighbours in k from a lane's
// row. A step here is 32 of k, two of those that the layout stores (format/integer.cuh). Its register 2 s + h holds row
// g + 8 h and, of stored step s, k = 2 t + 8 v + e as byte 2 e + v: lhs is interleaved likewise (problem.h).
#pragma once

#include <cstdint>

#include "cuda/device/format/integer.cuh"
#include "cuda/device/format/kinds.h"
#include "cuda/device/format/scale.cuh"

namespace jaxlowbit {

// Weights as Ts, times 2^kShift, exactly: without their scales, of type S, unless these are integers. kZeros: less
// integer zeros.
template <typename T, int kBits, Codebook kCodebook, typename S, bool kZeros>
struct ByteWeights;

// Weights become 16 (q - 8): in the upper half of a byte, q with its highest bit inverted is two's complement.
template <typename S>
struct ByteWeights<int8_t, 4, Codebook::kNone, S, false> {
  static constexpr int kShift = 4;

  static __device__ void Read(const uint32_t (&packed)[4], int step, uint32_t (&weights)[4]) {
    constexpr uint32_t kSigns = 0x80808080, kUpper = 0xf0f0f0f0;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t word = packed[2 * step + s];
      weights[2 * s] = (word << 4 ^ kSigns) & kUpper;
      weights[2 * s + 1] = (word ^ kSigns) & kUpper;
    }
  }
};

// Weights become (q - 8) s, of which a step has one scale: scales up to 16 leave q s + 128 - 8 s in a byte, and four of
// them are a product and a sum of words. `scales`: of rows g and g + 8, as they are in memory.
template <>
struct ByteWeights<int8_t, 4, Codebook::kNone, int8_t, false> {
  static constexpr int kShift = 0;

  static __device__ void Read(const uint32_t (&packed)[4], int step, uint32_t scales,
                              uint32_t (&weights)[4]) {
    constexpr uint32_t kSigns = 0x80808080, kLower = 0x0f0f0f0f;
    const uint32_t first = scales & 255, second = scales >> 8;
    const uint32_t first_offset = kSigns - first * 0x08080808;
    const uint32_t second_offset = kSigns - second * 0x08080808;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t word = packed[2 * step + s];
      weights[2 * s] = ((word & kLower) * first + first_offset) ^ kSigns;
      weights[2 * s + 1] = ((word >> 4 & kLower) * second + second_offset) ^ kSigns;
    }
  }
};

// Weights become q - z, of which a step has one zero, as q + 128 - z with its highest bit inverted: no sum leaves its
// byte. `zeros`: of rows g and g + 8, as they are in memory.
template <typename S>
struct ByteWeights<int8_t, 4, Codebook::kNone, S, true> {
  static constexpr int kShift = 0;

  static __device__ void Read(const uint32_t (&packed)[4], int step, uint32_t zeros,
                              uint32_t (&weights)[4]) {
    constexpr uint32_t kSigns = 0x80808080, kLower = 0x0f0f0f0f, kOnes = 0x01010101;
    const uint32_t first_offset = kSigns - (zeros & 255) * kOnes;
    const uint32_t second_offset = kSigns - (zeros >> 8) * kOnes;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t word = packed[2 * step + s];
      weights[2 * s] = ((word & kLower) + first_offset) ^ kSigns;
      weights[2 * s + 1] = ((word >> 4 & kLower) + second_offset) ^ kSigns;
    }
  }
};

// The bytes of rows g and g + 8 alternate in the words of 8 bits.
__device__ inline void SeparateRows(const uint32_t (&packed)[8], int step, uint32_t (&rows)[4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint32_t first = packed[4 * step + 2 * s], second = packed[4 * step + 2 * s + 1];
    rows[2 * s] = __byte_perm(first, second, 0x6240);
    rows[2 * s + 1] = __byte_perm(first, second, 0x7351);
  }
}

template <typename S>
struct ByteWeights<int8_t, 8, Codebook::kNone, S, false> {
  static constexpr int kShift = 0;

  static __device__ void Read(const uint32_t (&packed)[8], int step, uint32_t (&weights)[4]) {
    SeparateRows(packed, step, weights);
#pragma unroll
    for (uint32_t& weight : weights) weight ^= 0x80808080;  // q - 128
  }
};

template <typename S>
struct ByteWeights<E4m3, 8, Codebook::kE4m3, S, false> {
  static constexpr int kShift = 0;

  static __device__ void Read(const uint32_t (&packed)[8], int step, uint32_t (&weights)[4]) {
    SeparateRows(packed, step, weights);
  }
};

}  // namespace jaxlowbit
