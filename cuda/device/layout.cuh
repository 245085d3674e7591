// SPDX-License-Identifier: Apache-2.0
//
// Packed layout, version 1, on the device; jaxlowbit/_core/layout.py defines the same in Python (docs/layout.md).
//
// An atom is 64 output channels (n) by 64 input features (k), in the order of the mma m16n8k16
// operand A, weights being A:
//
//   n = 16 w + 8 h + g     warp w, row pair (g, g + 8)        lane = 4 g + t
//   k = 16 s + 8 v + 2 t + e    step s, register 2 v + h, half e
//
// format/integer.cuh extracts a lane's values.
//
// Levels of a product, from the instruction up. All kernels use these names:
//
//   name    n x k                        kernels           processed by
//   step    16 x 16 (wgmma: 64 x 16)     all               one mma of a warp, or one wgmma of a warpgroup
//   slice   16 channels of an atom       sm90_stream       a warp; a strip has 4
//   unit    64 x 64 or 64 x 32           sm90              the wgmma between two commits
//   atom    64 x 64                      all               (block of the packed layout)
//   strip   64 x all of k                all               (column of atoms; scales are stored by strips)
//   stage   the tile's n x 1 to 8 atoms  all               a CTA; one slot of the ring in shared memory
//   tile    plan.h                       all               a CTA, with its rows of lhs
#pragma once

#include <cstdint>

namespace jaxlowbit {

inline constexpr int kWarpsPerAtom = 4;
inline constexpr int kStepsPerAtom = 4;  // of 16 k each
inline constexpr int kStepK = 16;

template <int kBits>
inline constexpr int kAtomBytes = 64 * 64 * kBits / 8;

// Position of channel n inside the 64 scales or zeros of a group: rows g and g + 8 are neighbours.
__host__ __device__ constexpr int GroupPosition(int n) {
  return n / 16 * 16 + n % 8 * 2 + n / 8 % 2;
}

}  // namespace jaxlowbit
