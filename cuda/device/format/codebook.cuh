// SPDX-License-Identifier: Apache-2.0
//
// Decodes codebooks. Table entries are distributed over the lanes of a warp. Codes of 4-bit and 8-bit floats are
// converted by bit operations, without a table. Packed codes have the layout of integers (format/integer.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/format/integer.cuh"
#include "cuda/device/format/kinds.h"
#include "cuda/device/format/scale.cuh"
#include "cuda/device/pair.cuh"

namespace jaxlowbit {

// Whether entries are looked up, as float32. Codes of other codebooks are converted to 16-bit floats.
template <Codebook kCodebook>
inline constexpr bool kLooksUp = kCodebook == Codebook::kTable;

// Whether decoded entries lack a power of two (2^kRaised below), which is multiplied into the scale and so costs no
// instruction.
template <Codebook kCodebook>
inline constexpr bool kNeedsFactor = kCodebook == Codebook::kE2m1;

// A table of 2^bits entries. Lane i of a warp has entry i; the host repeats the entries to fill all lanes.
struct TableParams {
  float numbers[1 << kMaxTableBits];
};

// A lane's entry of a table; empty for other codebooks.
template <Codebook kCodebook>
struct Table {
  __device__ explicit Table(const TableParams&) {}
};

template <>
struct Table<Codebook::kTable> {
  float own;
  __device__ explicit Table(const TableParams& p) : own(p.numbers[threadIdx.x % 32]) {}
};

// Decodes the entries of a step, times 2^-kRaised, exactly, to pairs of T; registers alternate between rows g and g +
// 8.
template <typename T, Codebook kCodebook>
struct Numbers;

// Moves sign, two exponent bits and one mantissa bit to their positions in T.
template <typename T>
struct Numbers<T, Codebook::kE2m1> {
  static constexpr int kRaised = Pair<T>::kBias - 1;

  static __device__ void Read(const uint32_t (&packed)[4], int step, uint32_t (&numbers)[4]) {
    constexpr int kPlace = Pair<T>::kMantissaBits - 1;  // position of the mantissa bit
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = Integer<4>::Word(packed, step, j / 2) >> Integer<4>::Shift(step, j / 2);
      const int at = j % 2 * Integer<4>::kUp;
      const int sign_up = 12 - at, up = kPlace - at;
      if constexpr (kPlace + 4 <= 12) {
        // One multiplication copies the bits to both positions.
        const uint32_t bits = word & kValueMask<4> << at;
        constexpr uint32_t kKept = 0x80008000 | 7 * 0x00010001u << kPlace;
        numbers[j] = bits * ((1u << sign_up) + (1u << up)) & kKept;
      } else {
        numbers[j] =
            (word & 0x00080008 << at) * (1u << sign_up) + (word & 0x00070007 << at) * (1u << up);
      }
    }
  }
};

// 8-bit floats become f16, which represents all of them, NaN and infinities included.
template <typename T, Codebook kCodebook>
struct ByteNumbers {
  static constexpr int kRaised = 0;

  static __device__ void Read(const uint32_t (&packed)[8], int step, uint32_t (&numbers)[4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const uint32_t word = Integer<8>::Word(packed, step, v);
      if constexpr (kCodebook == Codebook::kE5m2) {
        numbers[2 * v] = __byte_perm(word, 0, 0x2404);
        numbers[2 * v + 1] = word & 0xff00ff00;
      } else {
        const uint32_t by_row = __byte_perm(word, 0, 0x3120);
        numbers[2 * v] = HalvesOfE4m3(by_row & 0xffff);
        numbers[2 * v + 1] = HalvesOfE4m3(by_row >> 16);
      }
    }
    if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        numbers[j] = Pair<T>::Round(Pair<__half>::Low(numbers[j]), Pair<__half>::High(numbers[j]));
      }
    }
  }
};

template <typename T>
struct Numbers<T, Codebook::kE4m3> : ByteNumbers<T, Codebook::kE4m3> {};
template <typename T>
struct Numbers<T, Codebook::kE5m2> : ByteNumbers<T, Codebook::kE5m2> {};

}  // namespace jaxlowbit
