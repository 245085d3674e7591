// SPDX-License-Identifier: Apache-2.0
//
// Weights for 8-bit instructions: operand A of m64nNk32, with four consecutive k of a row per register. A step here is
// 32 of k, two steps of the layout (format/integer.cuh). Register 2 s + h contains row g + 8 h of layout step s, with
// k = 2 t + 8 v + e as byte 2 e + v; lhs is interleaved the same way (problem.h).
#pragma once

#include <cstdint>

#include "cuda/device/format/integer.cuh"
#include "cuda/device/format/kinds.h"
#include "cuda/device/format/scale.cuh"

namespace jaxlowbit {

// Computes weights as Ts, times 2^kShift, exactly. Scales of type S are included only if they are integers. kZeros:
// integer zeros are subtracted.
template <typename T, int kBits, Codebook kCodebook, typename S, bool kZeros>
struct ByteWeights;

// Weights become 16 * (q - 8): q with its highest bit inverted is q - 8 in two's complement, in the upper half of a
// byte.
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

// Weights become (q - 8) * s with one scale per step. For scales up to 16, q * s + 128 - 8 * s fits a byte, so one
// multiplication and one addition of words compute four weights. `scales`: raw scales of rows g and g + 8.
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

// Weights become q - z with one zero per step, computed as q + 128 - z with the highest bit inverted, so no sum
// overflows its byte. `zeros`: raw zeros of rows g and g + 8.
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

// Separates rows g and g + 8, whose bytes alternate in the words of 8-bit weights.
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
