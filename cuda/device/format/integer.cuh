// SPDX-License-Identifier: Apache-2.0
//
// Extracts integers of each width from packed words: one trait per width. Packed layout, version 1 (docs/layout.md), as
// in jaxlowbit/_core/layout.py.
//
// A lane has 32 values of an atom: 8 for each of 4 steps of 16 k, i.e. 2 neighbours in k for each of the 4 registers 2
// v + h of the mma's operand A, with n = 8 h + g and k = 8 v + 2 t + e. The two values of a register (e = 0, 1) are in
// the halves of one word; rows g and g + 8 (h = 0, 1) are at two bit positions:
//
//   Word(packed, step, v) >> Shift(step, v):   e = 1: ... h=1 | h=0    e = 0: ... h=1 | h=0
//                                                       ◄ kUp ►                 ◄ kUp ►
//
// A trait has kFirstWords, kSecondWords and kThirdWords, the words per lane and atom in each bit plane (the planes of
// an atom are consecutive), kUp, Word and Shift. Bits around the values are undefined.
#pragma once

#include <cstdint>

namespace jaxlowbit {

template <int kBits>
struct Integer;

// Shifts by a number of bits that may be negative.
__device__ constexpr uint32_t ShiftUp(uint32_t word, int up) {
  return up >= 0 ? word << up : word >> -up;
}

// Bitwise select: `low` where the mask is set, else `high`, in one instruction. For a C++ expression the compiler
// generates four if the result is used twice, since it narrows the masks to the bits of each use.
__device__ inline uint32_t MergeBits(uint32_t mask, uint32_t low, uint32_t high) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;\n" : "=r"(d) : "r"(low), "r"(mask), "r"(high));
  return d;
}

//   1 bit, word 0            e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            s, v, h: as a number from 15 down to 0, in each half
template <>
struct Integer<1> {
  static constexpr int kFirstWords = 1, kSecondWords = 0, kThirdWords = 0;
  static constexpr int kUp = 1;
  static __device__ uint32_t Word(const uint32_t (&packed)[1], int, int) { return packed[0]; }
  static __device__ constexpr int Shift(int step, int v) { return step * 4 + v * 2; }
};

//   2 bits, word s / 2       e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            s % 2, v, h: as a number from 7 down to 0, in each half
template <>
struct Integer<2> {
  static constexpr int kFirstWords = 2, kSecondWords = 0, kThirdWords = 0;
  static constexpr int kUp = 2;
  static __device__ uint32_t Word(const uint32_t (&packed)[2], int step, int) {
    return packed[step / 2];
  }
  static __device__ constexpr int Shift(int step, int v) { return step % 2 * 8 + v * 4; }
};

//   3 bits, in planes, which merge into the order of 4 bits:
//   2 bits, word s / 2       e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            v, h, s % 2: as a number from 7 down to 0, in each half
//   1 bit, word 2            v, h, s: as a number from 15 down to 0, in each half
template <>
struct Integer<3> {
  static constexpr int kFirstWords = 2, kSecondWords = 1, kThirdWords = 0;
  static constexpr int kUp = 4;
  static __device__ uint32_t Word(const uint32_t (&packed)[3], int step, int) {
    constexpr uint32_t kLow = 0x33333333;  // the highest bit of each four is undefined
    const uint32_t low = packed[step / 2] >> step % 2 * 2;
    const uint32_t high = ShiftUp(packed[2], 2 - step);
    return (low & kLow) | (high & ~kLow);
  }
  static __device__ constexpr int Shift(int, int v) { return 8 * v; }
};

//   4 bits, word s           e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            v,h:   1,1  1,0  0,1  0,0 |        1,1  1,0  0,1  0,0
template <>
struct Integer<4> {
  static constexpr int kFirstWords = 4, kSecondWords = 0, kThirdWords = 0;
  static constexpr int kUp = 4;
  static __device__ uint32_t Word(const uint32_t (&packed)[4], int step, int) {
    return packed[step];
  }
  static __device__ constexpr int Shift(int, int v) { return 8 * v; }
};

// The lowest 6 bits of 6-bit and 7-bit values, as bytes, from one word of each of the first two planes.
__device__ inline uint32_t MergeSixBits(uint32_t first, uint32_t second, int step, int v) {
  return MergeBits(0x0f0f0f0f, first >> 4 * v, ShiftUp(second, 4 - step % 2 * 4 - v * 2));
}

//   5 bits, in planes, which merge into the order of 8 bits:
//   4 bits, word s           e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            h, v: as a number from 3 down to 0, in each half
//   1 bit, word 4            h, s, v: as a number from 15 down to 0, in each half
template <>
struct Integer<5> {
  static constexpr int kFirstWords = 4, kSecondWords = 1, kThirdWords = 0;
  static constexpr int kUp = 8;
  static __device__ uint32_t Word(const uint32_t (&packed)[5], int step, int v) {
    return MergeBits(0x0f0f0f0f, packed[step] >> 4 * v, ShiftUp(packed[4], 4 - step * 2 - v));
  }
  static __device__ constexpr int Shift(int, int) { return 0; }
};

//   6 bits, likewise:
//   4 bits, word s           as in 5 bits
//   2 bits, word 4 + s / 2   h, s % 2, v: as a number from 7 down to 0, in each half
template <>
struct Integer<6> {
  static constexpr int kFirstWords = 4, kSecondWords = 2, kThirdWords = 0;
  static constexpr int kUp = 8;
  static __device__ uint32_t Word(const uint32_t (&packed)[6], int step, int v) {
    return MergeSixBits(packed[step], packed[4 + step / 2], step, v);
  }
  static __device__ constexpr int Shift(int, int) { return 0; }
};

//   7 bits, likewise:
//   4 bits, 2 bits           as in 6 bits
//   1 bit, word 6            h, s, v: as a number from 15 down to 0, in each half
template <>
struct Integer<7> {
  static constexpr int kFirstWords = 4, kSecondWords = 2, kThirdWords = 1;
  static constexpr int kUp = 8;
  static __device__ uint32_t Word(const uint32_t (&packed)[7], int step, int v) {
    const uint32_t low = MergeSixBits(packed[step], packed[4 + step / 2], step, v);
    return MergeBits(0x3f3f3f3f, low, ShiftUp(packed[6], 6 - step * 2 - v));
  }
  static __device__ constexpr int Shift(int, int) { return 0; }
};

//   8 bits, word 2 s + v     e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            h:        1         0     |            1        0
template <>
struct Integer<8> {
  static constexpr int kFirstWords = 8, kSecondWords = 0, kThirdWords = 0;
  static constexpr int kUp = 8;
  static __device__ uint32_t Word(const uint32_t (&packed)[8], int step, int v) {
    return packed[2 * step + v];
  }
  static __device__ constexpr int Shift(int, int) { return 0; }
};

// The mask of a value in each half of a word.
template <int kBits>
inline constexpr uint32_t kValueMask = ((1u << kBits) - 1) * 0x00010001u;

template <int kBits>
inline constexpr int kNumPlanes =
    1 + (Integer<kBits>::kSecondWords > 0 ? 1 : 0) + (Integer<kBits>::kThirdWords > 0 ? 1 : 0);

// Offsets, in an atom, of the first word of each plane for lane `lane` of the atom's 128.
template <int kBits>
__device__ constexpr int FirstPlane(int lane) {
  return lane * 4 * Integer<kBits>::kFirstWords;
}
template <int kBits>
__device__ constexpr int SecondPlane(int lane) {
  return 512 * Integer<kBits>::kFirstWords + lane * 4 * Integer<kBits>::kSecondWords;
}
template <int kBits>
__device__ constexpr int ThirdPlane(int lane) {
  return 512 * (Integer<kBits>::kFirstWords + Integer<kBits>::kSecondWords) +
         lane * 4 * Integer<kBits>::kThirdWords;
}

}  // namespace jaxlowbit
