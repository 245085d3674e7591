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

// Returns `bits`, which ptxas does not know: it would replace a bit select by masks of each code, which takes two more
// instructions for four codes.
static __device__ __forceinline__ uint32_t Unknown(uint32_t bits) {
  uint32_t found;  // %tid.x is less than 65536
  asm("{\n.reg .u32 zero;\nmov.u32 zero, %%tid.x;\nshr.u32 zero, zero, 16;\nor.b32 %0, zero, %1;\n}"
      : "=r"(found)
      : "r"(bits));
  return found;
}

// Moves the sign of codes to bit 15 of a half, and the other bits to the bits from kPlace on. The word is shifted twice:
// one shift puts the magnitudes of two codes in place, the other their signs. Magnitudes and signs of two more codes are
// kApart bits below. A bit select merges both words.
template <typename T>
struct Numbers<T, Codebook::kE2m1> {
  static constexpr int kRaised = Pair<T>::kBias - 1;

  static __device__ void Read(const uint32_t (&packed)[4], int step, uint32_t (&numbers)[4]) {
    static_assert(Integer<4>::kUp == 4 && Integer<4>::Shift(0, 1) == 8);
    const uint32_t word = packed[step], magnitudes = Unknown(kMagnitude | kMagnitude >> kApart);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int code = kIsBf16 ? 2 * i + 1 : i + 2;  // the one in place
      const int up = kPlace - 4 * code, sign_up = 12 - 4 * code;
      const uint32_t moved = up < 0 ? word >> -up : word << up;
      const uint32_t two = (moved & magnitudes) | (word << sign_up & ~magnitudes);
      numbers[code] = two & kKept;
      numbers[code - kApart / 4] = two << kApart & kKept;
    }
  }

 private:
  static constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kPlace = Pair<T>::kMantissaBits - 1, kApart = kIsBf16 ? 4 : 8;
  static constexpr uint32_t kMagnitude = 7 * 0x00010001u << kPlace;
  static constexpr uint32_t kKept = kNegativeZeros | kMagnitude;
  static_assert((kKept & kKept >> kApart) == 0, "two codes share no bit");
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
