// SPDX-License-Identifier: Apache-2.0
//
// Shared by all parts of qmm_sm80: the constants of an instance, the kernel's parameters, a CTA's part of the problem,
// and the position of a stage among the groups.
#pragma once

#include "cuda/device/codebook_rows.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/schedule/batched.cuh"
#include "cuda/device/schedule/order.cuh"
#include "cuda/device/schedule/ragged.cuh"
#include "cuda/kernels/epilogue.cuh"
#include "cuda/kernels/sm80/plan.h"
#include "cuda/types.h"

namespace jaxlowbit::sm80 {

// Larger than all positions; sums with positions do not overflow.
inline constexpr int kNone = 0x3fffffff;
inline constexpr int kAtomsN = kBlockN / kAtom;
inline constexpr int kThreads = 32 * kWarpsPerAtom;

// The mma accumulate partial sums over this part of k, which are then added to the accumulators. kNone: none.
enum class PartialSums {
  kNone,
  kGroups,      // of a group, float32, then scaled (QuantizedMatmul::scale_accumulators)
  kHalfStages,  // of a stage, float16 (QuantizedMatmul::accumulate_float16)
};

// An instance: type of lhs, type of the scales, rows of a tile, width, kind of partial sums, and codebook.
template <typename LhsType, typename ScaleType, int kM, int kWidth,
          PartialSums kPartialSums = PartialSums::kNone, Codebook kNumbers = Codebook::kNone>
struct Instance {
  using T = LhsType;
  using S = ScaleType;
  static constexpr int kBlockM = kM;
  static constexpr int kBits = kWidth;
  static constexpr PartialSums kPartials = kPartialSums;
  static constexpr Codebook kCodebook = kNumbers;
  static constexpr int kAccumulatorBytes = kPartials == PartialSums::kGroups       ? 8
                                           : kPartials == PartialSums::kHalfStages ? 6
                                                                                   : 4;
  static constexpr int kBlockK = BlockK(kBits);
  static constexpr int kAtomsK = kBlockK / kAtom;
  static constexpr int kStages = NumStages(kBlockM, kBits);
  static constexpr int kTiles = kBlockM / 8;  // of the instruction, along the rows
  // 16-byte chunks of a row of lhs in a stage.
  static constexpr int kLhsChunks = kBlockK * 2 / kCopyBytes;
  static constexpr bool kRagged = false;
};

// The instance of a ragged product (device/schedule/ragged.cuh).
template <class Dense>
struct RaggedInstance : Dense {
  static constexpr bool kRagged = true;
};

struct Params {
  const void* lhs;
  const uint32_t* packed;
  const void* scale;
  const void* zero;      // null: zero point 2^(bits - 1)
  int zero_bytes;        // 1: zero points; else float zeros, of the type of the scales
  const int32_t* index;  // null: weight min(b, num_weights - 1)
  void* out;             // or the workspace, when split_k > 1
  int64_t batch, num_weights, m;
  int64_t lhs_columns;  // the reduced dimension: k, or n of the transposed product
  int64_t out_columns;  // n, or k
  // Rows of the workspace: out_columns padded to whole atoms; in a gated product the gate's, then up's.
  int64_t out_columns_padded;
  int atom_step;  // between the atoms of a tile, in rows of the workspace
  int64_t m_tiles, out_tiles;
  int stages;  // along the reduced dimension
  int n_blocks, k_blocks, groups;
  int group_size;  // INT_MAX for one group
  // A stage advances along k by block_groups * group_size + block_rest.
  int block_groups, block_rest;
  int groups_per_stage;
  int split_k;
  bool out_float;  // float32 out; else the type of lhs
  // Whether rows of lhs, and packed weights, scales and zeros, begin at multiples of 16 bytes.
  bool lhs_aligned, weights_aligned;
  StageBytes bytes;
  int slot_bytes;  // bytes.total()
  EpilogueParams epilogue;
  TableParams table;
  UnitParams units;
  RaggedParams ragged;  // for a RaggedInstance
};

// A CTA's part of the product.
struct Tile {
  int64_t m0;      // first row, of its batch element or of `rows`
  int64_t batch;   // position in the batch
  int64_t weight;  // number of the packed weight
  int64_t up;      // number of the other weight of a gated product
  int split;
  int block;                   // first atom along the columns of out
  int stage_begin, stage_end;  // along the reduced dimension
  RaggedTile rows;             // of a RaggedInstance
};

template <class I>
__device__ auto ScheduleOf(const Params& p, const Tile& tile) {
  if constexpr (I::kRagged) {
    const auto& [expert, column, first, end] = tile.rows;
    return Ragged<>{expert, first, first, end, p.ragged.experts, p.epilogue.gated};
  } else {
    return Batched<int64_t>{p.m, p.epilogue.gated};
  }
}

// Sets the weights and the stages of a tile whose other members are set.
template <class I>
__device__ void CompleteTile(const Params& p, Tile* tile) {
  const auto schedule = ScheduleOf<I>(p, *tile);
  tile->weight = WeightAt(p.index, p.num_weights, schedule.Position(tile->batch));
  tile->up =
      p.epilogue.gated ? WeightAt(p.index, p.num_weights, schedule.UpPosition(tile->batch)) : 0;
  const int per_split = (p.stages + p.split_k - 1) / p.split_k;
  tile->stage_begin = tile->split * per_split;
  tile->stage_end = min(p.stages, tile->stage_begin + per_split);
}

// `atoms`: atoms of a tile along the columns of out.
template <class I>
__device__ Tile OwnTile(const Params& p, int atoms) {
  const RowsFirst order = {p.m_tiles, p.out_tiles, p.split_k};
  const TilePlace<int64_t> place = order.Find(blockIdx.x, atoms, I::kBlockM);
  Tile tile;
  tile.m0 = place.row;
  tile.block = place.column;
  tile.split = place.split;
  tile.batch = place.batch;
  CompleteTile<I>(p, &tile);
  return tile;
}

// The position of a stage among the groups along k.
struct GroupCursor {
  int group;   // the group of the position
  int offset;  // of the position in its group

  static __device__ GroupCursor At(const Params& p, int k) {
    return {k / p.group_size, k % p.group_size};
  }
  __device__ void AdvanceStage(const Params& p) {
    group += p.block_groups;
    offset += p.block_rest;
    if (offset >= p.group_size) {
      offset -= p.group_size;
      ++group;
    }
  }
};

// Index of the chunk in shared memory for 16-byte column `column` of row `row`. A phase of ldmatrix reads one column of
// 8 rows; unpermuted, these would conflict in one bank group, so columns are permuted within each row.
template <class I>
__device__ int LhsChunk(int row, int column) {
  return row * I::kLhsChunks + (column ^ (row % 8));
}

// Index of the chunk in shared memory for chunk `chunk` of packed weights. With two chunks per lane and atom, the first
// reads of lanes i and i + 4 would conflict in one bank group, so chunks are swapped pairwise in every other run of 8.
template <class I>
__device__ int PackedChunk(int chunk) {
  return kWholeChunks<I::kBits> && kLaneChunks<I::kBits> == 2 ? chunk ^ (chunk / 8 % 2) : chunk;
}

// Starts copying 16 bytes of packed weights to chunk `chunk` of the stage at `packed`.
template <class I>
__device__ void CopyPackedChunk(const Params& p, uint32_t packed, int chunk, const void* source,
                                bool valid) {
  const uint32_t target = packed + PackedChunk<I>(chunk) * kCopyBytes;
  if (p.weights_aligned) {
    CopyAsync(target, source, valid);
  } else {
    CopyAsyncByWords(target, source, valid);
  }
}

// Starts copying 16 bytes of scales or zeros.
__device__ inline void CopyGroupChunk(const Params& p, uint32_t target, const void* source,
                                      bool valid) {
  if (p.weights_aligned) {
    CopyAsync(target, source, valid);
  } else {
    CopyBytes(target, source, valid);
  }
}

// Stores one element of a tile to out or, with split-K, to this split's partial sums in the workspace, whose rows are
// padded to whole atoms.
template <class I>
__device__ void StoreOut(const Params& p, const Tile& tile, int64_t row, int64_t column,
                         float value) {
  const bool partial = p.split_k > 1;
  const int64_t row_size = partial ? p.out_columns_padded : p.out_columns;
  const auto schedule = ScheduleOf<I>(p, tile);
  if (row >= schedule.Rows(tile.batch) || column >= row_size) return;
  const int64_t split_offset = tile.split * p.batch * p.m * row_size;
  const int64_t offset = split_offset + schedule.Row(tile.batch, row) * row_size + column;
  if (partial || p.out_float) {
    static_cast<float*>(p.out)[offset] = value;
  } else {
    using T = typename I::T;
    static_cast<T*>(p.out)[offset] = T(value);
  }
}

// Runs the stages of a tile through the ring: `copier` is kStages - 1 stages ahead of `multiplier`.
template <class I, class Copier, class Multiplier, class Accumulators>
__device__ void RunStages(const Params& p, const Tile& tile, uint32_t ring, Copier& copier,
                          Multiplier& multiplier, Accumulators& acc) {
  const uint32_t end = ring + I::kStages * p.slot_bytes;
  uint32_t free_slot = ring;
#pragma unroll
  for (int i = 0; i < I::kStages - 1; ++i) {
    if (tile.stage_begin + i < tile.stage_end) copier.CopyNext(free_slot);
    CommitCopies();
    free_slot += p.slot_bytes;
  }
  uint32_t slot = ring;
  for (int stage = tile.stage_begin; stage < tile.stage_end; ++stage) {
    WaitCopies<I::kStages - 2>();
    // Every thread's part of this stage has arrived, and all warps have read the previous slot, which the next copy
    // overwrites.
    __syncthreads();
    if (stage + I::kStages - 1 < tile.stage_end) copier.CopyNext(free_slot);
    CommitCopies();
    free_slot = slot;
    multiplier.MultiplyNext(slot, acc);
    slot += p.slot_bytes;
    if (slot == end) slot = ring;
  }
}

}  // namespace jaxlowbit::sm80
