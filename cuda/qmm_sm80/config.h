// SPDX-License-Identifier: Apache-2.0
//
// The tile of qmm_sm80 as numbers, for the kernel and for the selection, which has no CUDA.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit::qmm_sm80 {

inline constexpr int kBlockN = 2 * kAtom;          // output channels of a CTA
inline constexpr int kMinGroupSize = 16;           // one step of the instruction lies in one group
inline constexpr int kMaxSharedBytes = 99 * 1024;  // per CTA on sm_86 and sm_89, the smallest

// k of a stage: 8 KiB of codes whatever the width.
constexpr int BlockK(int bits) { return bits == 4 ? 128 : 64; }

// Depth of the ring: what fits the smallest device with the smallest groups.
constexpr int NumStages(int block_m, int bits) { return bits == 4 && block_m == 64 ? 3 : 4; }

// CTAs whose registers fit a multiprocessor; the compiler is held to it.
constexpr int CtasByRegisters(int block_m) { return block_m <= 16 ? 5 : block_m == 32 ? 4 : 3; }

// Groups that a stage can touch. Stages start at multiples of BlockK, groups anywhere.
constexpr int GroupsPerStage(int bits, int64_t group_size) {
  const int64_t block_k = BlockK(bits);
  if (group_size < 0 || group_size % block_k == 0) return 1;
  if (block_k % group_size == 0) return static_cast<int>(block_k / group_size);
  return static_cast<int>((block_k - 1 + group_size - 1) / group_size + 1);
}

// A stage in shared memory: codes, activations, scales, zeros, in this order.
struct StageBytes {
  int codes, lhs, scales, zeros;
  constexpr int total() const { return codes + lhs + scales + zeros; }
};

constexpr StageBytes StageBytesOf(int block_m, int bits, int64_t group_size, int scale_bytes,
                                  bool has_zeros) {
  const int per_group = kBlockN * GroupsPerStage(bits, group_size);
  return {kBlockN * BlockK(bits) * bits / 8, block_m * BlockK(bits) * 2, per_group * scale_bytes,
          has_zeros ? per_group : 0};
}

constexpr int SharedBytes(int block_m, int bits, int64_t group_size, int scale_bytes,
                          bool has_zeros) {
  return NumStages(block_m, bits) *
         StageBytesOf(block_m, bits, group_size, scale_bytes, has_zeros).total();
}

static_assert(SharedBytes(32, 4, kMinGroupSize, 4, true) <= kMaxSharedBytes &&
                  SharedBytes(64, 4, kMinGroupSize, 4, true) <= kMaxSharedBytes &&
                  SharedBytes(64, 8, kMinGroupSize, 4, true) <= kMaxSharedBytes,
              "the largest stages must fit the smallest device");

}  // namespace jaxlowbit::qmm_sm80
