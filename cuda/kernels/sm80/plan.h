// SPDX-License-Identifier: Apache-2.0
//
// Geometry of qmm_sm80 and qmm_sm80_transposed, shared by device code and selection: tiles, stages, shared memory,
// registers.
#pragma once

#include <cstdint>

#include "cuda/gpu.h"
#include "cuda/types.h"

namespace jaxlowbit::sm80 {

// Rows of lhs per tile. PartialSums::kGroups doubles the accumulators, so those tiles have up to 32 rows.
inline constexpr int kBlockMs[] = {8, 16, 32, 64};
inline constexpr int kScaleAccumulatorsBlockMs[] = {8, 16, 32};

inline constexpr int kMinBlockM = kBlockMs[0];
inline constexpr int kBlockN = 2 * kAtom;  // output channels per tile
inline constexpr int kMinGroupSize = 16;   // k of one mma, which must lie in one group
inline constexpr int kMaxSharedBytes = kSm86SharedBytesPerSm - kReservedSharedBytes;

// k per stage (n if transposed): 8 KiB of packed 4-bit or 8-bit weights.
constexpr int BlockK(int bits) { return bits <= 4 ? 128 : 64; }

// Columns of out in a tile: two strips along n, or one atom along k.
constexpr int64_t BlockOut(bool transposed) { return transposed ? kAtom : kBlockN; }

// Stages of the ring, limited by the shared memory of sm_86 with the smallest groups.
constexpr int NumStages(int block_m, int bits) { return bits <= 4 && block_m == 64 ? 3 : 4; }

// CTAs per multiprocessor by registers, for __launch_bounds__. `accumulator_bytes`: register bytes per accumulator: 4
// for float32, 6 with an additional float16 partial sum, 8 with a float32 one.
constexpr int CtasByRegisters(int block_m, int accumulator_bytes) {
  if (accumulator_bytes == 8) return block_m <= 16 ? 4 : 2;
  const int fewer = accumulator_bytes == 6 && block_m >= 32 ? 1 : 0;
  return (block_m == 8 ? 5 : block_m <= 32 ? 4 : 3) - fewer;
}

// Maximum number of groups in a range of `size` along k that begins at a multiple of `size`.
constexpr int GroupsPer(int64_t size, int64_t group_size) {
  if (group_size < 0 || group_size % size == 0) return 1;
  if (size % group_size == 0) return static_cast<int>(size / group_size);
  return static_cast<int>((size - 1 + group_size - 1) / group_size + 1);
}

// A stage in shared memory: packed weights, lhs, scales, zeros, in this order.
struct StageBytes {
  int packed, lhs, scales, zeros;
  constexpr int total() const { return packed + lhs + scales + zeros; }
};

// `scale_bytes`, `zero_bytes`: of one scale and of one zero; 0 without zeros.
constexpr StageBytes StageBytesOf(int block_m, int bits, int64_t group_size, int scale_bytes,
                                  int zero_bytes, bool transposed) {
  // Two strips along n (transposed: one atom along k), times the atoms along the reduced dimension.
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

// Shared memory of a CTA: the ring, which the transposed product reuses to add the partial sums of its warps.
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

}  // namespace jaxlowbit::sm80
