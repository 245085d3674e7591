// SPDX-License-Identifier: Apache-2.0
//
// Shared by all parts of qmm_sm90: the constants of an instance, the kernel's parameters, the order of tiles, and the
// layout of shared memory.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/codebook_rows.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/schedule/batched.cuh"
#include "cuda/device/schedule/order.cuh"
#include "cuda/device/schedule/ragged.cuh"
#include "cuda/kernels/epilogue.cuh"
#include "cuda/kernels/sm90/plan.h"
#include "cuda/types.h"

namespace jaxlowbit::sm90 {

inline constexpr int kLhsRowBytes = 128;  // row of a block: one atom of k in 16 bits, two in 8

// An instance: type of lhs, type of the scales, kind of zeros, width, number of its tile shape, codebook.
template <typename LhsType, typename ScaleType, ZeroKind kZeros, int kWidth, int kNumber,
          Codebook kNumbers = Codebook::kNone>
struct Instance {
  using T = LhsType;
  using S = ScaleType;
  static constexpr bool k8BitLhs = sizeof(T) == 1;
  using Out = std::conditional_t<k8BitLhs, __nv_bfloat16, T>;  // results, if they are not float32
  static constexpr ZeroKind kZero = kZeros;
  static constexpr int kBits = kWidth;
  static constexpr Codebook kCodebook = kNumbers;
  // Whether the scales and zeros of a single group are applied to accumulators, not to weights.
  static constexpr bool kScalesChannels =
      kZero != ZeroKind::kFloat && !kLooksUp<kCodebook> &&
      !(k8BitLhs && (sizeof(S) == 1 || kZero != ZeroKind::kNone));
  // Whether the format may have groups of 16.
  static constexpr bool kSupportsGroupsOf16 = SupportsGroupsOf16(kCodebook, sizeof(S));
  static constexpr TileShape kTile = kTiles[kNumber];
  static constexpr int kM = kTile.m;
  static constexpr int kStrips = kTile.strips;  // of a warpgroup
  static constexpr int kCtaStrips = kTile.cta_strips();
  static constexpr int kStageAtoms = kTile.stage_atoms;
  static constexpr int kWarps = 4 * kTile.warpgroups;  // consumers
  static constexpr int kThreads = kTile.threads();
  static constexpr int kLhsBytes = kM * kLhsRowBytes;                               // of a block
  static constexpr int kLhsBlocks = kStageAtoms * static_cast<int>(sizeof(T)) / 2;  // of a stage
  static constexpr bool kIsInt8 = std::is_same_v<T, int8_t>;
  // Whether group scales are integers that multiply 8-bit weights, so that one accumulator covers all of k.
  static constexpr bool kIntegerScales = k8BitLhs && sizeof(S) == 1;
  static_assert(!k8BitLhs || kTile.supports_8bit_lhs(kIsInt8, kZero != ZeroKind::kNone));
  // Registers of a thread: at launch, of a consumer, of a producer.
  static constexpr int kRegisters = 65536 / (kThreads * kTile.ctas_per_sm) / 8 * 8;
  static constexpr int kCopyRegisters = kRegisters > 128 ? 40 : 32;
  static constexpr int kMultiplyRegisters =
      (kRegisters * kThreads / 128 - kCopyRegisters) / (kWarps / 4) / 8 * 8;
  static constexpr bool kReallocatesRegisters =
      kRegisters < 256;  // 255 registers per thread is the hardware limit
  static constexpr int kStoreRows = StoreRows(kTile);
  static constexpr bool kRagged = false;
};

// The instance of a ragged product (device/schedule/ragged.cuh).
template <class Dense>
struct RaggedInstance : Dense {
  static constexpr bool kRagged = true;
};

// Named barriers, the first of each kind: of a warpgroup; of both warpgroups of a gated tile, which has no third one; of
// a warpgroup and the producer's warp, at the start; of a warpgroup and the warp that reads its scales.
inline constexpr int kWarpgroupBarrier = 1, kExchangeBarrier = 3, kStartBarrier = 4,
                     kScalesBarrier = 8;
inline constexpr int kWarpgroupAndWarp = 128 + 32;  // threads of the last two

// Code path of the epilogue.
enum class Form {
  // In registers, stored by TMA: no activation; with or without a bias and a residual that TMA loads
  kSum,
  kSigmoid,  // activations with a SigmoidForm; gated without residuals
  kGelu,     // by erf; not gated
  kRelu,     // not gated
  kFloat,    // float32 results, in registers: no activation, no residual; not gated
  kOther     // in a loop, through shared memory
};

struct Params {
  // [batch, atoms or 1, m, k of an atom or all k] in tiles of `lhs_rows` and an atom or a stage
  CUtensorMap lhs;
  CUtensorMap last_lhs;  // likewise, in tiles of `last_rows` and an atom
  // [weights x strips, atoms, 128 bytes] in tiles of a stage and the strips of one load
  CUtensorMap packed;
  CUtensorMap scales;    // [weights x strips, groups, 64] likewise
  CUtensorMap zeros;     // [weights x strips, groups, 64] likewise, if there are any
  CUtensorMap out;       // [batch, m, n] in tiles of kStoreRows and 64 of n, if `aligned`
  CUtensorMap residual;  // the epilogue's residual in such tiles, if `residual_by_tma`
  const void* scale;
  const int32_t* index;  // null: weight min(b, num_weights - 1)
  void* out_data;
  bool out_float;        // float32 out; else Instance::Out
  bool out_integers;     // int32 out: accumulators contain the bits of integers
  bool aligned;          // rows of out begin at multiples of 16 bytes, and out is not float32
  bool residual_by_tma;  // rows of the residual do too, and form is not kOther
  Form form;
  int64_t num_weights;
  int m, n;
  int lhs_rows;  // rows per load: of a tile, or of a peer's part of it
  // Rows of the last tile of a batch element, or a peer's part, in multiples of 8; 0: same as other tiles. The last
  // tile has separate loads, since TMA is slower for rows out of bounds. Rows beyond are undefined in shared memory,
  // and their accumulators are not stored.
  int last_rows;
  // Whether one load covers all atoms of a stage: k is a multiple of 64, and there are no peers.
  bool lhs_in_atoms;
  int group_bytes;  // bytes of scales and zeros loaded per stage
  int n_blocks, k_blocks, groups;
  // Strips per batch element; Tile::strip counts them. Gated: strips of the gate and of up alternate.
  int strips;
  Divider atoms_per_group;  // 1 for a group of less than 64
  int groups_per_atom;      // 1 for a group of 64 and more
  // Tiles of clusters: 2^peer_shift neighbours along n.
  int tiles_n;
  WideDivider batch_tiles, band_tiles;  // of a batch element; of a band (order.cuh)
  WideDivider last_width;               // of the last band
  int peer_shift;  // peers: the CTAs of a cluster, which share lhs by multicast
  // The stream-K schedule: whole tiles come first, then the tail, whose k is split.
  int whole_tiles, splits;
  int num_tasks;        // whole tiles, and parts of tail tiles
  float* partial_sums;  // of the tail, for reduce.cuh
  Plan plan;
  EpilogueParams epilogue;
  TableParams table;
  const float* lhs_scale;  // [batch, m], of an lhs of 8 bits
  UnitParams units;
  int ahead_stages;     // stages whose weights are loaded before the previous kernels have ended
  RaggedParams ragged;  // for a RaggedInstance
};

// A position in the product. Ragged: `batch` is the expert, or negative for rows that are zero; rows count from the
// first one of lhs.
struct Tile {
  int batch, strip, m0;
  int end;  // ragged: the end of the group's rows
};

__device__ inline Batched<int> ScheduleOf(const Params& p) { return {p.m, p.epilogue.gated}; }

// The rows and weights of a tile. Ragged: rows count from the first one of lhs, and Rows is the group's end.
template <class I, bool kMayBeGated = true>
__device__ auto ScheduleOf(const Params& p, const Tile& tile) {
  if constexpr (I::kRagged) {
    return Ragged<kMayBeGated>{tile.batch, 0, 0, tile.end, p.ragged.experts, p.epilogue.gated};
  } else {
    return Batched<int, kMayBeGated>{p.m, p.epilogue.gated};
  }
}

// The tile of the first peer of a cluster.
__device__ inline Tile TileOf(const Params& p, int number, int strips, int m) {
  const Bands bands = {p.tiles_n, p.batch_tiles, p.band_tiles, p.last_width};
  const TilePlace<int> place = bands.Find(number, strips, m);
  return {place.batch, place.column, place.row, 0};
}

// The index of a tile's strip `number`, counted over all weights.
template <class I>
__device__ inline int64_t StripOf(const Params& p, const Tile& tile, int number) {
  const bool gated = p.epilogue.gated;
  const int position = ScheduleOf<I>(p, tile).Position(tile.batch, number);
  return WeightAt(p.index, p.num_weights, position) * p.n_blocks +
         (gated ? (tile.strip + number) / 2 : tile.strip + number);
}

// Shared memory: barriers, then results to store, then the ring of stages, then their scales and zeros.
struct Memory {
  uint32_t base;

  // Stage `slot` has been loaded (full), or has been read by every warp of all peers (empty).
  __device__ uint32_t full(int slot) const { return base + slot * kBarrierBytes; }
  __device__ uint32_t empty(int slot) const { return base + (kMaxStages + slot) * kBarrierBytes; }
  // The residual of a store tile has arrived in this buffer of the warpgroup.
  __device__ uint32_t residual_full(int warpgroup, int buffer) const {
    return base + (2 * kMaxStages + warpgroup * kResultBuffers + buffer) * kBarrierBytes;
  }
  // The first warpgroup has read the second's accumulators.
  __device__ uint32_t up_empty() const {
    return base + (2 * kMaxStages + kMaxWarpgroups * kResultBuffers) * kBarrierBytes;
  }
  // Both warpgroups of a gated tile have arrived (TileStorer::SynchronizeWarpgroups).
  __device__ uint32_t exchange() const { return up_empty() + kBarrierBytes; }
  __device__ uint32_t results() const { return base + kTmaAlignment; }
  __device__ uint32_t stage(const Plan& plan, int slot) const {
    return base + plan.ring + slot * plan.slot_bytes;
  }
  // The scales and zeros of a stage.
  __device__ uint32_t scales(const Plan& plan, int slot) const {
    return base + plan.scales + slot * plan.scales_bytes;
  }
  // Ragged: tile `number` of this CTA, which the producer stores before it loads the first stage.
  __device__ void StoreTile(int number, const Tile& tile) const {
    const auto word = [](int value) { return static_cast<uint32_t>(value); };
    StoreShared16(TileRecord(number),
                  make_uint4(word(tile.batch), word(tile.strip), word(tile.m0), word(tile.end)));
  }
  __device__ Tile LoadTile(int number) const {
    const auto value = [](uint32_t word) { return static_cast<int>(word); };
    const uint4 tile = LoadShared16(TileRecord(number));
    return {value(tile.x), value(tile.y), value(tile.z), value(tile.w)};
  }
  __device__ uint32_t TileRecord(int number) const {
    return base + kBarriersBytes + number % kTileRecords * kTileRecordBytes;
  }
  // The table of a RaggedInstance.
  __device__ RaggedTable groups(const Plan& plan) const {
    return RaggedTable(scales(plan, plan.num_stages));
  }
};

template <class I>
__device__ inline int NumTasks(const Params& p, Memory memory) {
  if constexpr (!I::kRagged) return p.num_tasks;
  return memory.groups(p.plan).NumProducts(p.ragged);
}

// The work item of a CTA: a tile, or a part of a tail tile along k.
struct Task {
  Tile tile;
  int partial;               // index of the part, counted over all tail tiles; -1: a whole tile
  int atom_begin, atom_end;  // along k
};

__device__ inline Task WholeTile(const Params& p, const Tile& tile) {
  return {tile, -1, 0, p.k_blocks};
}

// The task of one peer of a cluster.
template <class I>
__device__ inline Task TaskOf(const Params& p, Memory memory, int number, int rank) {
  if constexpr (I::kRagged) {
    const RaggedTile tile = memory.groups(p.plan).Find(p.ragged, number);
    return WholeTile(p, {tile.expert, tile.column * I::kCtaStrips, tile.first, tile.end});
  }
  Task task;
  int tile = number, begin = 0, end = p.plan.stages;
  task.partial = -1;
  if (number >= p.whole_tiles) {
    task.partial = number - p.whole_tiles;
    const int tail_tile = task.partial / p.splits;
    const int part = task.partial - tail_tile * p.splits;
    tile = p.whole_tiles + tail_tile;
    end = p.plan.stages * (part + 1) / p.splits;
    begin = p.plan.stages * part / p.splits;
  }
  task.tile = TileOf(p, tile, I::kCtaStrips << p.peer_shift, I::kM);
  task.tile.strip += rank * I::kCtaStrips;
  task.atom_begin = begin * I::kStageAtoms;
  task.atom_end = min(p.k_blocks, end * I::kStageAtoms);
  return task;
}

// Partial sums of a part of a tile: blocks of 8 rows of every strip, in register order; each thread of a warpgroup has
// two rows of two channels of a block.
inline constexpr int kBlockSums = 128 * 4;

// The offset of the partial sums of part `partial`.
__device__ inline int64_t FirstPartialSum(int partial, int strips, int m) {
  return int64_t{partial} * strips * (m / 8) * kBlockSums;
}

// The first group that an atom along k touches.
__device__ inline int FirstGroup(const Params& p, int atom) {
  return p.atoms_per_group.Divide(atom) * p.groups_per_atom;
}

}  // namespace jaxlowbit::sm90
