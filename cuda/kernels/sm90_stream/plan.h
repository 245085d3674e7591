// SPDX-License-Identifier: Apache-2.0
//
// Geometry of qmm_sm90_stream: slices, tiles, stages and shared memory as numbers, for the device code and for the
// selection.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {
struct QuantizedMatmul;
}

namespace jaxlowbit::sm90_stream {

inline constexpr int kSliceRows = 16;      // output channels of one instruction: a slice
inline constexpr int kStepRows = 16;       // input features of one instruction: a step
inline constexpr int kSlicesPerStrip = 4;  // of the 64 channels of an atom
inline constexpr int kWarps = 8;           // consumers; one more warp is the producer
inline constexpr int kSlicesPerWarp = 2;
inline constexpr int kMaxTileSlices = kWarps * kSlicesPerWarp;
inline constexpr int kMaxClusterSlices = 2 * kMaxTileSlices;
inline constexpr int kClusterCtas[] = {1, 2, 4};
inline constexpr int kMaxStages = 16;
inline constexpr int kMaxCtasPerSm = 2;
inline constexpr int kMaxProducts = 4;      // products of one launch
inline constexpr int kTmaAlignment = 1024;  // of a swizzled tensor-map tile in shared memory
inline constexpr int kBarriersBytes = 512;  // room for all barriers, at the start

// How activations reach shared memory: with the weights of each stage, or all of a CTA's part of k before its first
// tile, by its consumers, which gather permuted activations (gather.cuh) or round those of 16 bits (round.cuh).
enum class LhsWay { kStages, kGathers, kRounds };

// The most packed weights in a CTA's ring: with more of them in flight, all take longer.
inline constexpr int kMostPackedBytes = 64 * 1024;

// A CTA that has a multiprocessor to itself takes more than half of its shared memory, so that two never meet on one
// if they start while an earlier kernel still fills others. If a ring of kAloneStages fits, it takes no more than
// leaves room for a CTA of the next kernel, whose weights are then there when this kernel ends.
inline constexpr int kAloneBytes = 117 * 1024;
inline constexpr int kAloneStages = 3;

// The most shared memory for activations that a CTA gathers, with the rows it gathers them from, or that it rounds.
// More would leave too little for weights.
inline constexpr int kMostGatheredBytes = 24 * 1024;

// The most rows that the product rounds itself. A warp takes columns of one row, and scales have room for as many rows.
inline constexpr int kMostRoundedRows = 2;
static_assert(kMostRoundedRows <= kWarps);

// The most atoms of a stage that one warp multiplies, with tiles of `block_m` rows.
constexpr int MaxWarpAtoms(int bits, int block_m) { return bits < 4 && block_m == 8 ? 4 : 2; }

// The most rows of lhs: with wide weights, and with scales of two levels, 32 rows would take more registers than there
// are.
constexpr int MaxRows(int bits, ElementType scale) {
  return bits <= 4 && scale != ElementType::kSuper ? 32 : 16;
}

// Atoms along k of a super-block, whose scales have two levels.
inline constexpr int kSuperAtoms = static_cast<int>(kSuperBlock / kAtom);
inline constexpr int kSuperShift = 2;
static_assert(1 << kSuperShift == kSuperAtoms);

// Whether a tile has whole strips: where words are in several bit planes, and where a stage is small.
constexpr bool HasWholeStrips(int bits) { return bits < 4 || (bits & (bits - 1)) != 0; }

// Slices of a gated product are those of a strip of the gate, then those of the same strip of up.
inline constexpr int kPairSlices = 2 * kSlicesPerStrip;

// Rows of lhs of the smallest instance that holds `m`.
constexpr int BlockM(int64_t m) { return m <= 8 ? 8 : m <= 16 ? 16 : 32; }

// A stage in shared memory: lhs, if it comes with stages, packed weights, scales, zeros, in this order.
struct StageBytes {
  int lhs, packed, scales, zeros;
  constexpr int total() const { return lhs + packed + scales + zeros; }
};

// The plan of one product. A cluster owns `slices` neighbouring slices of channels and works through them in tiles of
// up to `tile_slices`; each of its CTAs owns a part of k, in stages of `stage_atoms` atoms.
struct Plan {
  int cluster_shift;  // a cluster is 2^cluster_shift CTAs
  int slices, tile_slices;
  int warps_k;                     // parts of a stage's k; the warps of each part divide the slices
  int stage_shift, stage_atoms;    // 2^stage_shift atoms along k
  int warp_atoms;                  // neighbouring atoms of a stage that one warp multiplies
  int stages;                      // of all of k
  int stage_groups, stage_strips;  // the most that a stage touches; of two levels, rows of scales
  StageBytes bytes;
  int slot_bytes;   // bytes.total(), aligned
  int owned_shift;  // a CTA reduces up to 2^owned_shift slices of a tile
  LhsWay way;       // of activations
  int lhs_rows;     // rows of lhs in shared memory: block_m, or fewer
  // Offsets of activations that do not come with stages, and, where they are gathered, of their rows.
  int gathered, whole_rows;
  int ring;          // offset of the stages
  int num_stages;    // of the ring; the plan cannot run with fewer than 2
  int shared_bytes;  // of a CTA
};

// Whether every stage of so many atoms begins with a group, or lies in one.
inline constexpr bool SupportsGroupSize(int stage_atoms, int64_t size) {
  const int64_t stage_k = stage_atoms * kAtom;
  return size < 0 || size == 16 || size == 32 ||
         (size % kAtom == 0 && (stage_k % size == 0 || size % stage_k == 0));
}

// The plan for clusters of `cluster_ctas` that own `slices` slices, with `ctas_per_sm` CTAs on a multiprocessor.
Plan PlanOf(const QuantizedMatmul& problem, int cluster_ctas, int slices, int ctas_per_sm);

}  // namespace jaxlowbit::sm90_stream
