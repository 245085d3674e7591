// SPDX-License-Identifier: Apache-2.0
//
// The tile of qmm_sm80 as numbers, for the kernel and for the selection, which has no CUDA.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit::qmm_sm80 {

inline constexpr int kBlockN = 2 * kAtom;          // output channels of a CTA
inline constexpr int kMinBlockM = 8;               // tokens of the smallest tile
inline constexpr int kMinGroupSize = 16;           // one step of the instruction lies in one group
inline constexpr int kMaxSharedBytes = 99 * 1024;  // per CTA on sm_86 and sm_89, the smallest

// k of a stage (n, of the transposed product): 8 KiB of codes whatever the width.
constexpr int BlockK(int bits) { return bits == 4 ? 128 : 64; }

// Columns of out that a CTA owns: two strips along n, or one along k.
constexpr int64_t BlockOut(bool transposed) { return transposed ? kAtom : kBlockN; }

// Tiles along the columns of out. One of a gated product is a strip of the gate and that of up.
inline int64_t OutTiles(const QuantizedMatmul& problem) {
  return problem.epilogue.gated ? problem.n_blocks()
                                : CeilDiv(problem.out_columns(), BlockOut(problem.transposed));
}

// Depth of the ring: what fits the smallest device with the smallest groups.
constexpr int NumStages(int block_m, int bits) { return bits == 4 && block_m == 64 ? 3 : 4; }

// Bytes of registers for one sum: float32; with it a float16 part; or two of float32, for the
// transposed product and for scales on the sums.
constexpr int SumBytes(const QuantizedMatmul& problem) {
  if (problem.transposed || problem.scale_sums) return 8;
  return problem.half_sums && problem.lhs == ElementType::kF16 ? 6 : 4;
}

// CTAs whose registers fit a multiprocessor; the compiler is held to it.
constexpr int CtasByRegisters(int block_m, int sum_bytes) {
  if (sum_bytes == 8) return block_m <= 16 ? 4 : 2;
  const int fewer = sum_bytes == 6 && block_m >= 32 ? 1 : 0;
  return (block_m == 8 ? 5 : block_m <= 32 ? 4 : 3) - fewer;
}

// Groups that `size` positions along k can touch, from a multiple of `size` on.
constexpr int GroupsPer(int64_t size, int64_t group_size) {
  if (group_size < 0 || group_size % size == 0) return 1;
  if (size % group_size == 0) return static_cast<int>(size / group_size);
  return static_cast<int>((size - 1 + group_size - 1) / group_size + 1);
}

// A stage in shared memory: codes, activations, scales, zeros, in this order.
struct StageBytes {
  int codes, lhs, scales, zeros;
  constexpr int total() const { return codes + lhs + scales + zeros; }
};

// `scale_bytes` and `zero_bytes`: of one scale and one zero, 0 where there are none.
constexpr StageBytes StageBytesOf(int block_m, int bits, int64_t group_size, int scale_bytes,
                                  int zero_bytes, bool transposed) {
  // A stage is atoms along what is summed over: of two strips along n, or of one along k.
  const int atoms =
      (transposed ? 1 : kBlockN / static_cast<int>(kAtom)) * BlockK(bits) / static_cast<int>(kAtom);
  const int strips =
      transposed ? BlockK(bits) / static_cast<int>(kAtom) : kBlockN / static_cast<int>(kAtom);
  const int per_group =
      strips * static_cast<int>(kAtom) *
      (transposed ? GroupsPer(kAtom, group_size) : GroupsPer(BlockK(bits), group_size));
  return {atoms * static_cast<int>(kAtom * kAtom) * bits / 8, block_m * BlockK(bits) * 2,
          per_group * scale_bytes, per_group * zero_bytes};
}

// Of a CTA: the ring, and for the transposed product what its warps add up in afterwards.
constexpr int SharedBytes(int block_m, int bits, int64_t group_size, int scale_bytes,
                          int zero_bytes, bool transposed) {
  const int ring =
      NumStages(block_m, bits) *
      StageBytesOf(block_m, bits, group_size, scale_bytes, zero_bytes, transposed).total();
  const int sums = transposed ? 4 * static_cast<int>(kAtom) * block_m * 4 : 0;
  return ring > sums ? ring : sums;
}

static_assert(SharedBytes(32, 4, kMinGroupSize, 4, 4, false) <= kMaxSharedBytes &&
                  SharedBytes(64, 4, kMinGroupSize, 4, 4, false) <= kMaxSharedBytes &&
                  SharedBytes(64, 8, kMinGroupSize, 4, 4, false) <= kMaxSharedBytes &&
                  SharedBytes(64, 4, kMinGroupSize, 4, 4, true) <= kMaxSharedBytes &&
                  SharedBytes(64, 8, kMinGroupSize, 4, 4, true) <= kMaxSharedBytes,
              "the largest stages must fit the smallest device");

}  // namespace jaxlowbit::qmm_sm80
