// SPDX-License-Identifier: Apache-2.0
//
// Packed layout, version 1, on the device: the twin of jaxlowbit/_core/layout.py (docs/layout.md).
//
// An atom is 64 output channels (n) by 64 input features (k), in the order of the mma m16n8k16
// operand A, weights being A:
//
//   n = 16 w + 8 h + g     warp w, row pair (g, g + 8)        lane = 4 g + t
//   k = 16 s + 8 v + 2 t + e    step s, register 2 v + h, half e
//
// A lane owns kBits consecutive words, kWordsPerStep of them for each step s:
//
//   4 bits, word s           e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            v,h:   1,1  1,0  0,1  0,0 |        1,1  1,0  0,1  0,0
//   8 bits, word 2 s + v     e = 1: 31      ...     16 | e = 0: 15      ...      0
//                            h:        1         0     |            1        0
//
// so (word >> 4 * j) & 0x000f000f, respectively (word >> 8 * h) & 0x00ff00ff, are the two values of
// one register, each in its half.
#pragma once

#include <cstdint>

namespace jaxlowbit {

inline constexpr int kWarpsPerAtom = 4;
inline constexpr int kStepsPerAtom = 4;  // of 16 k each
inline constexpr int kStepK = 16;

template <int kBits>
inline constexpr int kWordsPerStep = kBits / 4;

template <int kBits>
inline constexpr int kAtomBytes = 64 * 64 * kBits / 8;

// Position of channel n inside the 64 scales or zeros of a group: rows g and g + 8 are neighbours.
__host__ __device__ constexpr int GroupPosition(int n) {
  return n / 16 * 16 + n % 8 * 2 + n / 8 % 2;
}

}  // namespace jaxlowbit
