// SPDX-License-Identifier: Apache-2.0
//
// What every part of qmm_sm90 shares: the constants of an instance, the problem as the kernel reads
// it, the tiles in their order, and where things lie in shared memory.
#pragma once

#include <cuda.h>

#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/problem.h"
#include "cuda/qmm_sm90/config.h"

namespace jaxlowbit::qmm_sm90 {

// An instance: type of lhs, type of the scales, kind of zeros, width, number of its tile.
template <typename LhsType, typename ScaleType, ZeroKind kZeros, int kWidth, int kNumber>
struct Instance {
  using T = LhsType;
  using S = ScaleType;
  static constexpr ZeroKind kZero = kZeros;
  static constexpr int kBits = kWidth;
  static constexpr TileShape kTile = kTiles[kNumber];
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kStrips = kTile.strips;  // of a warpgroup
  static constexpr int kCtaStrips = kTile.cta_strips();
  static constexpr int kStageAtoms = kTile.stage_atoms;
  static constexpr int kWarps = 4 * kTile.warpgroups;  // that multiply
  static constexpr int kThreads = kTile.threads();
  // Registers of a thread: at the start, of a multiplying one, of a copying one.
  static constexpr int kRegisters = 65536 / (kThreads * kTile.ctas_per_sm) / 8 * 8;
  static constexpr int kCopyRegisters = kRegisters > 80 ? 40 : 32;
  static constexpr int kMultiplyRegisters =
      (kRegisters * kThreads / 128 - kCopyRegisters) / (kWarps / 4) / 8 * 8;
  static constexpr int kStoreTokens =
      kTokens < qmm_sm90::kStoreTokens ? kTokens : qmm_sm90::kStoreTokens;
};

struct Params {
  CUtensorMap lhs;       // [batch, m, k] in boxes of a mate's part of a tile's tokens and 64 of k
  CUtensorMap out;       // [batch, m, n] in boxes of kStoreTokens and 64 of n, if `aligned`
  CUtensorMap residual;  // the same of the epilogue's, if `residual_boxes`
  const uint32_t* packed;
  const void* scale;
  const void* zero;      // null: zero point 2^(bits - 1)
  int zero_bytes;        // 1: zero points; else float zeros, of the type of the scales
  const int32_t* index;  // null: weight min(b, num_weights - 1)
  void* out_elements;
  bool out_float;       // float32 out; else the type of lhs
  bool aligned;         // rows of out begin at multiples of 16 bytes, and it has the type of lhs
  bool residual_boxes;  // the same of the residual
  int64_t num_weights;
  int m, n;
  int n_blocks, k_blocks, groups;
  // Of the weights of an element of the batch; of a gated product, gate and up take turns. Tiles are
  // counted in these.
  int strips;
  Divider atoms_per_group;  // 1 for a group of less than 64
  int groups_per_atom;      // 1 for a group of 64 and more
  // In units of what a cluster computes: 2^mate_shift neighbours along n.
  int tiles_m, tiles_n;
  int num_tiles;    // of the whole batch
  int mate_shift;   // mates: the CTAs of a cluster that share activations
  int split_shift;  // the parts of k, each for 2^mate_shift CTAs of a cluster
  Plan plan;
  EpilogueParams epilogue;
};

// A position in the product.
struct Tile {
  int batch, strip, token;
};

// Tiles that are worked on at the same time should share what they read: in bands of this many tiles
// along n, and in a band the tokens last.
inline constexpr int kBand = 16;

// The tile of the first mate of a cluster.
__device__ inline Tile TileOf(const Params& p, int number, int strips, int tokens) {
  const int per_batch = p.tiles_m * p.tiles_n;
  const int batch = number / per_batch;
  const int in_batch = number - batch * per_batch;
  const int band = in_batch / (kBand * p.tiles_m);
  const int in_band = in_batch - band * kBand * p.tiles_m;
  const int width = min(kBand, p.tiles_n - band * kBand);
  const int along_m = in_band / width;
  return {batch, (band * kBand + in_band - along_m * width) * strips, along_m * tokens};
}

// This CTA's part of a cluster's tile.
struct Share {
  int mate;                  // its tile, among neighbours along n
  int part;                  // of k
  int atom_begin, atom_end;  // along k
};

__device__ inline Share OwnShare(const Params& p, int stage_atoms) {
  Share share;
  const int rank = ClusterRank();
  share.part = rank >> p.mate_shift;
  share.mate = rank - (share.part << p.mate_shift);
  share.atom_begin = (p.plan.stages * share.part >> p.split_shift) * stage_atoms;
  const int end = (p.plan.stages * (share.part + 1) >> p.split_shift) * stage_atoms;
  share.atom_end = min(p.k_blocks, end);
  return share;
}

__device__ inline int RankOf(const Params& p, int part, int mate) {
  return (part << p.mate_shift) + mate;
}

// The first group that an atom along k touches.
__device__ inline int FirstGroup(const Params& p, int atom) {
  return p.atoms_per_group.Divide(atom) * p.groups_per_atom;
}

// Shared memory: barriers, then results on their way out, then the ring of stages.
struct Memory {
  uint32_t base;

  // Stage `slot` holds what was copied; has been read by every warp of all mates.
  __device__ uint32_t full(int slot) const { return base + slot * kBarrierBytes; }
  __device__ uint32_t empty(int slot) const { return base + (kMaxStages + slot) * kBarrierBytes; }
  // All sums of the cluster that this CTA adds up have arrived.
  __device__ uint32_t sums_full() const { return base + 2 * kMaxStages * kBarrierBytes; }
  // The residual of a warpgroup's box has arrived in this one of its buffers.
  __device__ uint32_t residual_full(int warpgroup, int buffer) const {
    return sums_full() + (1 + warpgroup * kResultBuffers + buffer) * kBarrierBytes;
  }
  __device__ uint32_t results() const { return base + kBoxBytes; }
  __device__ uint32_t stage(const Plan& plan, int slot) const {
    return base + plan.ring + slot * plan.slot_bytes;
  }
};

}  // namespace jaxlowbit::qmm_sm90
