// SPDX-License-Identifier: Apache-2.0
//
// Geometry of qmm_sm90_stream, shared by device code and selection: slices, tiles, stages, shared memory.
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
// Ragged: the producer passes tiles on to the consumers. It is at most a ring of stages ahead of them, and they need the
// tile before, too.
inline constexpr int kMaxRaggedStages = 8, kTileRecords = kMaxRaggedStages + 4;
inline constexpr int kTileRecordBytes = 16;

// How activations reach shared memory. kStages: by TMA with the weights of each stage. kGathers, kRounds: the consumers
// write all activations of the CTA's part of k before its first tile, gathering permuted columns (gather.cuh) or
// rounding 16-bit values to 8 bits (round.cuh).
enum class LhsPath { kStages, kGathers, kRounds };

// Maximum packed weights in a CTA's ring. More loads in flight slow down all of them.
inline constexpr int kMaxPackedBytes = 64 * 1024;

// With one CTA per SM, a CTA requests more than half of the shared memory. Otherwise two CTAs could start on one SM
// while an earlier kernel still occupies the others. If a ring of kExclusiveStages fits, it requests only
// kExclusiveBytes: then a CTA of the next (PDL) kernel also fits and loads its first weights before this kernel ends.
inline constexpr int kExclusiveBytes = 117 * 1024;
inline constexpr int kExclusiveStages = 3;

// Maximum shared memory for gathered activations and their source rows, or for rounded activations. The rest is for
// weights.
inline constexpr int kMaxGatheredBytes = 24 * 1024;

// Maximum rows with kRounds. A warp rounds columns of one row.
inline constexpr int kMaxRoundedRows = 2;
static_assert(kMaxRoundedRows <= kWarps);

// Maximum atoms per warp and stage, for tiles of `block_m` rows.
constexpr int MaxWarpAtoms(int bits, int block_m) { return bits < 4 && block_m == 8 ? 4 : 2; }

// Maximum rows of lhs. Above 4 bits, and with two-level scales, 32 rows do not fit the registers.
constexpr int MaxRows(int bits, ElementType scale) {
  return bits <= 4 && !HasTwoLevels(scale) ? 32 : 16;
}

// Atoms along k in a super-block of two-level scales.
inline constexpr int kSuperAtoms = static_cast<int>(kSuperBlock / kAtom);
inline constexpr int kSuperShift = 2;
static_assert(1 << kSuperShift == kSuperAtoms);

// Whether tiles consist of whole strips: for widths with several bit planes, and for 1 and 2 bits, whose stages are
// small.
constexpr bool HasWholeStrips(int bits) { return bits < 4 || (bits & (bits - 1)) != 0; }

// Gated products: the slices of a strip of the gate precede the slices of the same strip of up.
inline constexpr int kPairSlices = 2 * kSlicesPerStrip;

// Rows of the smallest instance for `m`.
constexpr int BlockM(int64_t m) { return m <= 8 ? 8 : m <= 16 ? 16 : 32; }

// A stage in shared memory, in this order; lhs only with LhsPath::kStages.
struct StageBytes {
  int lhs, packed, scales, zeros;
  constexpr int total() const { return lhs + packed + scales + zeros; }
};

// The plan of one product. A cluster owns `slices` neighbouring slices and iterates over them in tiles of up to
// `tile_slices`. Each of its CTAs owns a part of k, in stages of `stage_atoms` atoms.
struct Plan {
  int cluster_shift;  // a cluster is 2^cluster_shift CTAs
  int slices, tile_slices;
  int warps_k;                   // parts of a stage's k; the warps of each part divide the slices
  int stage_shift, stage_atoms;  // 2^stage_shift atoms along k
  int warp_atoms;                // neighbouring atoms of a stage that one warp multiplies
  int stages;                    // of all of k
  int stage_groups,
      stage_strips;  // maximum per stage; with two-level scales, stage_groups counts rows of scales
  StageBytes bytes;
  int slot_bytes;    // bytes.total(), aligned
  int owned_shift;   // a CTA reduces up to 2^owned_shift slices of a tile
  LhsPath lhs_path;  // of activations
  int lhs_rows;      // rows of lhs in shared memory: block_m, or fewer
  // Offsets of gathered or rounded activations, and of the source rows of gathered ones.
  int gathered, whole_rows;
  int ring;          // offset of the stages
  int num_stages;    // of the ring; the plan cannot run with fewer than 2
  int shared_bytes;  // of a CTA; ragged: including the table of groups, behind the stages
  int sums_bytes;    // of the partial sums of a tile; ragged: there are two such buffers
};

// Whether each stage of `stage_atoms` atoms begins with a group or lies inside one.
inline constexpr bool SupportsGroupSize(int stage_atoms, int64_t size) {
  const int64_t stage_k = stage_atoms * kAtom;
  return size < 0 || size == 16 || size == 32 ||
         (size % kAtom == 0 && (stage_k % size == 0 || size % stage_k == 0));
}

// The plan for clusters of `cluster_ctas` CTAs with `slices` slices, and `ctas_per_sm` CTAs per SM.
Plan PlanOf(const QuantizedMatmul& problem, int cluster_ctas, int slices, int ctas_per_sm);

}  // namespace jaxlowbit::sm90_stream
