// SPDX-License-Identifier: Apache-2.0
//
// Shared by all parts of qmm_sm90_stream: the constants of an instance, the kernel's parameters, a CTA's part of the
// problem, and the layout of shared memory.
#pragma once

#include <cuda.h>

#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/codebook_rows.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/format/integer.cuh"
#include "cuda/device/inboxes.h"
#include "cuda/device/layout.cuh"
#include "cuda/device/schedule/batched.cuh"
#include "cuda/device/schedule/listed.cuh"
#include "cuda/device/schedule/ragged.cuh"
#include "cuda/kernels/epilogue.cuh"
#include "cuda/kernels/sm90_stream/plan.h"
#include "cuda/types.h"

namespace jaxlowbit::sm90_stream {

inline constexpr int kConsumerThreads = 32 * kWarps;
// A CTA has one producer warp, or in a ragged product two.
constexpr int ThreadsOf(bool ragged) { return kConsumerThreads + (ragged ? 2 : 1) * 32; }
inline constexpr int kRowBytes = kAtom * 2;  // of lhs and an atom

// An instance: type of lhs, type of the scales, kind of zeros, maximum rows, width, CTAs per multiprocessor by
// registers, the load path of lhs, codebook.
template <typename LhsType, typename ScaleType, ZeroKind kZeros, int kM, int kWidth, int kCtas,
          LhsPath kPath = LhsPath::kStages, Codebook kNumbers = Codebook::kNone>
struct Instance {
  using T = LhsType;
  using S = ScaleType;
  static constexpr ZeroKind kZero = kZeros;
  static constexpr int kBits = kWidth;
  static constexpr Codebook kCodebook = kNumbers;
  static constexpr int kCtasPerSm = kCtas;
  static constexpr LhsPath kLhsPath = kPath;
  // Whether scales have two levels, and whether they come with zeros, which multiply sums of lhs.
  static constexpr bool kSuperBlocks = std::is_same_v<ScaleType, Super>;
  static constexpr bool kSumsLhs = kSuperBlocks && kZeros == ZeroKind::kFloat;
  // Whether a single row of lhs has a separate code path (StageMultiplier::MultiplyOneRow).
  static constexpr bool kHasOneRow = kSuperBlocks && kM == 8;
  // Whether scales multiply accumulators. They multiply weights instead in four cases: float zeros, because products of
  // uncentred integers and of zeros would cancel; 32 rows, because the partial sums of a group need too many registers;
  // codebooks whose scaling needs no additional instruction; table numbers, which T may not represent exactly.
  static constexpr bool kScaleAccumulators = (kZeros != ZeroKind::kFloat || kSumsLhs) && kM < 32 &&
                                             !kLooksUp<kCodebook> && !kNeedsFactor<kCodebook>;
  static constexpr int kTiles = kM / 8;  // of the instruction, along the rows
  static constexpr int kSliceBytes = kAtomBytes<kBits> / kSlicesPerStrip;
  static constexpr bool kWholeStrips = HasWholeStrips(kBits);
  static constexpr bool kRagged = false, kListed = false, kDivided = false;
  // Whether the next kernel may start only after some loads (Params::loads_until_next), rather than at once.
  static constexpr bool kStartsNextLate = kM == 8;
};

// The instance of a ragged product (device/schedule/ragged.cuh).
template <class Dense>
struct RaggedInstance : Dense {
  static constexpr bool kRagged = true;
};

// The instance of a ragged product whose rows share no CTA (device/schedule/listed.cuh): a dense product, whose
// CTAs find their expert first.
template <class Dense>
struct ListedInstance : Dense {
  static constexpr bool kListed = true;
  static constexpr bool kStartsNextLate = false;
};

// The instance of a product that several devices compute: it may send its result and hold the next kernel.
template <class Dense>
struct DividedInstance : Dense {
  static constexpr bool kDivided = true;
  static constexpr bool kStartsNextLate = false;
};

template <class I>
inline constexpr bool kHasExperts = I::kRagged || I::kListed;

// One of the products of a launch.
struct Product {
  const uint32_t* packed;
  const void* scale;
  const void* zero;      // null: zero point 2^(bits - 1)
  const int32_t* index;  // null: weight min(b, num_weights - 1)
  void* out;
  int64_t num_weights;
  int n, n_blocks;
  int strips;  // of the weights of a batch element
};

struct Params {
  CUtensorMap lhs;  // [batch * m, k] in tiles of an instance's rows and a stage's k
  Product products[kMaxProducts];
  // The first cluster of each product along the grid; beyond the grid for absent products.
  int first_cluster[kMaxProducts];
  // For a kernel that gathers or rounds lhs: the original lhs, its permutation, and the columns of a permuted part.
  const void* original_lhs;
  const int32_t* permutation;
  int part_columns;
  int zero_bytes;  // 1: zero points; else float zeros, of the type of the scales
  int m;
  int k_blocks;
  int groups;               // rows of scales of a strip
  Divider atoms_per_group;  // 1 for a group of less than 64
  int groups_per_atom;      // 1 for a group of 64 and more
  int atom_step;            // offset between the groups of a warp's first and second atom, in rows
  // In a stage, the zero point of a row is at zeros_at + (place of its scale) / sizeof(S).
  int zeros_at;
  Divider pairs;   // of a tile's slices
  bool out_float;  // float32 out; else the type of lhs
  // For a DividedInstance: the next kernel starts after the previous one has ended; the result goes to `inboxes`, not to
  // `out`. These two fill padding, so that the other members keep their places.
  bool holds_next, sends;
  int prologue_stages;  // stages whose weights are loaded before any activations
  EpilogueParams epilogue;
  Plan plan;
  // Additional offset between the groups of a warp's first and second pair of atoms, in rows. Members from here on are
  // off the common path and must stay last: placed earlier, this one moved common members to other lines of the
  // constant cache, and 4096 x 4096 took 3 % longer.
  int pair_step;
  TableParams table;
  // The residual is a float32 factor of each row [batch * m], and there is no other epilogue.
  bool apply_lhs_scale;
  // Groups per super-block, and groups of a super-block per stage.
  int super_groups, stage_super_groups;
  int group_shift;  // a group is 2^group_shift steps of k
  bool to_float8;   // for a kernel that rounds lhs: to values of e4m3, not of int8
  UnitParams units[kMaxProducts];
  int loads_until_next;  // stages to load after the first ring until the next kernel may start
  RaggedParams ragged;   // for a RaggedInstance
  ListedParams listed;   // for a ListedInstance
  Inboxes inboxes;       // for a DividedInstance
};

// Synchronizes the consumers.
__device__ inline void SynchronizeConsumers() { Synchronize(1, kConsumerThreads); }

// The product of the launch that a CTA computes.
__device__ inline int OwnProduct(const Params& p) {
  const int cluster = Opaque(static_cast<int>(blockIdx.x)) >> p.plan.cluster_shift;
  int own = 0;
#pragma unroll
  for (int part = 1; part < kMaxProducts; ++part) own += cluster >= p.first_cluster[part];
  return own;
}

__device__ inline Batched<int> ScheduleOf(const Params& p) { return {p.m, p.epilogue.gated}; }

// The part of the product that a CTA owns.
struct Share {
  int batch;  // position in the batch
  int rank;   // in the cluster
  int slice_begin, slice_end;
  int stages;                // of each tile
  int atom_begin, atom_end;  // along k
  RaggedTile tile;           // of a RaggedInstance; of a ListedInstance only its expert
};

__device__ inline Share OwnShare(const Params& p) {
  const Plan& plan = p.plan;
  Share share;
  share.rank = ClusterRank();
  share.batch = static_cast<int>(blockIdx.y);
  const int part = OwnProduct(p), cluster = static_cast<int>(blockIdx.x) >> plan.cluster_shift;
  share.slice_begin = (cluster - p.first_cluster[part]) * plan.slices;
  share.slice_end = min(p.products[part].strips * kSlicesPerStrip, share.slice_begin + plan.slices);
  const int begin = plan.stages * share.rank >> plan.cluster_shift;
  const int end = plan.stages * (share.rank + 1) >> plan.cluster_shift;
  share.stages = end - begin;
  share.atom_begin = begin * plan.stage_atoms;
  share.atom_end = min(p.k_blocks, end * plan.stage_atoms);
  return share;
}

// The share of a tile of a RaggedInstance.
__device__ inline Share RaggedShareOf(const Params& p, const RaggedTile& tile) {
  Share share = OwnShare(p);
  share.tile = tile;
  share.slice_begin = share.tile.column * p.plan.slices;
  share.slice_end = min(p.products[0].strips * kSlicesPerStrip, share.slice_begin + p.plan.slices);
  return share;
}

// The rows and weights of a share.
template <class I>
__device__ auto ScheduleOf(const Params& p, const Share& share) {
  if constexpr (I::kRagged) {
    const RaggedTile& tile = share.tile;
    // TMA reads slower beyond the last row, so the last tiles begin earlier.
    const int first = min(tile.first, max(0, p.ragged.rows - p.plan.lhs_rows));
    const int end = min(tile.end, tile.first + p.ragged.block);
    return Ragged<>{tile.expert, first, tile.first, end, p.ragged.experts, p.epilogue.gated};
  } else if constexpr (I::kListed) {
    return Listed{share.tile.expert, p.listed, p.epilogue.gated};
  } else {
    return ScheduleOf(p);
  }
}

// The row of lhs for row 0 of a share.
template <class I>
__device__ int LhsRow(const Params& p, const Share& share) {
  const auto schedule = ScheduleOf<I>(p, share);
  if constexpr (I::kListed) {
    return schedule.LhsRow(share.batch);
  } else {
    return static_cast<int>(schedule.Row(share.batch, 0));
  }
}

// Slice `number` of a tile in warp order, two per warp. In a gated product a warp's two slices are the same channels of
// the gate and of up.
__device__ inline int TileSlice(const Params& p, int number) {
  if (!p.epilogue.gated) return number;
  const int pair = number / 2;
  return pair / kSlicesPerStrip * kPairSlices + number % 2 * kSlicesPerStrip +
         pair % kSlicesPerStrip;
}

// The first group that an atom along k touches.
__device__ inline int FirstGroup(const Params& p, int atom) {
  return p.atoms_per_group.Divide(atom) * p.groups_per_atom;
}

// The row of that group's scales. In two-level scales each super-block's floats follow its groups.
template <class I>
__device__ inline int FirstScaleRow(const Params& p, int atom) {
  const int group = FirstGroup(p, atom);
  if constexpr (!I::kSuperBlocks) return group;
  return group + (atom >> kSuperShift) * static_cast<int>(kFloatRows);
}

// Shared memory: barriers, then partial sums received from the cluster, then the ring of stages.
struct Memory {
  uint32_t base;

  // Stage `slot` has been loaded (full), or has been read by every warp (empty).
  __device__ uint32_t full(int slot) const { return base + slot * kBarrierBytes; }
  __device__ uint32_t empty(int slot) const { return base + (kMaxStages + slot) * kBarrierBytes; }
  // All partial sums of a tile have arrived (full), or every CTA of the cluster has read its own (free). Buffer 1 exists
  // in a RaggedInstance.
  __device__ uint32_t partials_full(int buffer = 0) const {
    return base + (2 * kMaxStages + 2 * buffer) * kBarrierBytes;
  }
  __device__ uint32_t partials_free(int buffer = 0) const {
    return partials_full(buffer) + kBarrierBytes;
  }
  // For a kernel that rounds lhs: the barrier for the maximum magnitudes from the cluster's warps, the scales of the
  // rows, and those magnitudes, one per warp and CTA.
  __device__ uint32_t largest_full() const { return partials_free() + kBarrierBytes; }
  __device__ uint32_t row_scale(int row) const { return largest_full() + kBarrierBytes + 4 * row; }
  __device__ uint32_t largest(int number) const { return row_scale(kWarps + number); }
  __device__ uint32_t partials(const Plan& plan, int buffer) const {
    return base + kBarriersBytes + buffer * plan.sums_bytes;
  }
  __device__ uint32_t stage(const Plan& plan, int slot) const {
    return base + plan.ring + slot * plan.slot_bytes;
  }
  // Ragged: tile `number` of this CTA, which the producer stores before it loads the first stage.
  __device__ void StoreTile(int number, const RaggedTile& tile) const {
    StoreShared16(TileRecord(number), make_uint4(tile.expert, tile.column, tile.first, tile.end));
  }
  __device__ RaggedTile LoadTile(int number) const {
    const uint4 tile = LoadShared16(TileRecord(number));
    return {static_cast<int>(tile.x), static_cast<int>(tile.y), static_cast<int>(tile.z),
            static_cast<int>(tile.w)};
  }
  // Listed: the expert of the CTA's row; negative: none.
  __device__ void StoreExpert(int expert) const {
    StoreShared4(TileRecord(0), static_cast<uint32_t>(expert));
  }
  __device__ int LoadExpert() const { return static_cast<int>(LoadShared4(TileRecord(0))); }
  __device__ uint32_t TileRecord(int number) const {
    return partials_full(2) + number % kTileRecords * kTileRecordBytes;
  }
  __device__ RaggedTable groups(const Plan& plan) const {
    return RaggedTable(stage(plan, plan.num_stages));
  }
};

// The share of a CTA that is not persistent.
template <class I>
__device__ Share OwnShare(const Params& p, Memory memory) {
  Share share = OwnShare(p);
  if constexpr (I::kListed) share.tile.expert = memory.LoadExpert();
  return share;
}

}  // namespace jaxlowbit::sm90_stream
