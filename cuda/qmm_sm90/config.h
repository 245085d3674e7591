// SPDX-License-Identifier: Apache-2.0
//
// How qmm_sm90 divides a product, as numbers, for the kernel and for the selection, which has no
// CUDA.
#pragma once

#include <cstdint>
#include <iterator>

#include "cuda/problem.h"

namespace jaxlowbit::qmm_sm90 {

// What a CTA computes at a time. A strip is 64 output channels, the rows of one instruction.
struct TileShape {
  int tokens;
  int strips;       // of a warpgroup
  int warpgroups;   // that multiply; a warp of one more copies
  int ctas_per_sm;  // that registers and shared memory are divided for
  int stage_atoms;  // along k, of a stage

  constexpr int cta_strips() const { return strips * warpgroups; }
  // Gate and up take turns among the strips.
  constexpr bool takes_gated() const { return cta_strips() % 2 == 0; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
};

inline constexpr TileShape kTiles[] = {{256, 1, 2, 1, 1}, {128, 1, 2, 1, 2}, {64, 1, 1, 2, 2},
                                       {64, 2, 1, 2, 2},  {32, 2, 1, 2, 2},  {128, 1, 3, 1, 2},
                                       {128, 1, 1, 1, 2}};
inline constexpr int kNumTiles = static_cast<int>(std::size(kTiles));
inline constexpr int kMaxWarpgroups = 3;

inline constexpr int kMaxParts = 8;  // that k is divided into
inline constexpr int kMaxStages = 8;
inline constexpr int kBoxBytes = 1024;  // alignment of boxes of activations and of results
inline constexpr int kBarriersBytes = 256;
inline constexpr int kStoreBuffers = 4;
// Of those, where results are; with an epilogue, sums wait in the others.
inline constexpr int kResultBuffers = 2;

// Shared memory of a CTA: of 228 KiB, 1 KiB for the system.
constexpr int SharedBytes(const TileShape& tile) { return (228 / tile.ctas_per_sm - 1) * 1024; }

// Tokens that a warpgroup stores at a time; three leave more shared memory to the stages.
constexpr int StoreTokens(const TileShape& tile) {
  const int most = tile.warpgroups > 2 ? 32 : 64;
  return tile.tokens < most ? tile.tokens : most;
}

// Of a gated product that two warpgroups finish, each half of the tokens.
constexpr int GatedBoxTokens(const TileShape& tile) {
  const int half = tile.tokens / 2;
  return half < StoreTokens(tile) ? half : StoreTokens(tile);
}

// A stage in shared memory: activations and codes, in this order; scales and zeros, the same.
struct StageBytes {
  int lhs, codes, scales, zeros;
};

struct Plan {
  int stages;        // of all of k
  int stage_groups;  // most that a stage touches
  StageBytes bytes;
  int slot_bytes;  // of activations and codes: boxes, so that the ring wastes nothing
  int row_bytes;   // of scales and zeros
  int ring, rows;  // where those of the first stage begin
  int num_stages;  // depth of the ring; below 2: not to be run

  int shared_bytes() const { return rows + num_stages * row_bytes; }
};

inline Plan PlanOf(const QuantizedMatmul& problem, const TileShape& tile) {
  Plan plan = {};
  const int64_t stage_k = tile.stage_atoms * kAtom, size = problem.group_size;
  plan.stages = static_cast<int>(CeilDiv(problem.k_blocks(), tile.stage_atoms));
  // A stage may begin inside a group.
  plan.stage_groups = static_cast<int>(size < 0              ? 1
                                       : stage_k % size == 0 ? stage_k / size
                                       : size % stage_k == 0 ? 1
                                                             : stage_k / size + 2);
  const int per_group = tile.cta_strips() * plan.stage_groups * static_cast<int>(kAtom);
  plan.bytes = {
      tile.stage_atoms * tile.tokens * static_cast<int>(kAtom) * 2,
      tile.stage_atoms * tile.cta_strips() * static_cast<int>(kAtom * kAtom) * problem.bits / 8,
      per_group * static_cast<int>(problem.scale_bytes()),
      per_group * static_cast<int>(problem.zero_bytes())};
  const auto boxes = [](int bytes) {
    return static_cast<int>(CeilDiv(bytes, kBoxBytes)) * kBoxBytes;
  };
  plan.slot_bytes = plan.bytes.lhs + plan.bytes.codes;
  plan.row_bytes = plan.bytes.scales + plan.bytes.zeros;
  plan.ring = boxes(kBarriersBytes) +
              kStoreBuffers * tile.warpgroups * StoreTokens(tile) * static_cast<int>(kAtom) * 2;
  const int fit = (SharedBytes(tile) - plan.ring) / (plan.slot_bytes + plan.row_bytes);
  plan.num_stages = fit < kMaxStages ? fit : kMaxStages;
  plan.rows = plan.ring + plan.num_stages * plan.slot_bytes;
  return plan;
}

// What CTAs that stay for task after task compute: first as many whole tiles as give each the same
// number, then the tiles that are left. With more parts than one these are divided along k, so that
// every CTA has some of them. Counted in tiles of clusters of mates, who do not divide theirs.
struct Division {
  int64_t resident;     // clusters
  int64_t whole_tiles;  // all, with one part
  int64_t divided_tiles;
  int parts;  // of a divided tile

  int64_t tasks() const { return whole_tiles + divided_tiles * parts; }
  int64_t workspace_bytes(const TileShape& tile) const {
    return divided_tiles * parts * tile.tokens * tile.cta_strips() * kAtom *
           static_cast<int64_t>(sizeof(float));
  }
};

inline Division DivisionOf(const QuantizedMatmul& problem, const TileShape& tile, int mates,
                           int parts, int num_sms) {
  const int64_t tiles = CeilDiv(problem.m, tile.tokens) *
                        CeilDiv(problem.strips(), tile.cta_strips() * mates) * problem.batch;
  const int64_t resident = num_sms * tile.ctas_per_sm / mates;
  Division division = {resident > 0 ? resident : 1, tiles, 0, parts};
  if (parts > 1) division.whole_tiles = tiles / division.resident * division.resident;
  division.divided_tiles = tiles - division.whole_tiles;
  return division;
}

}  // namespace jaxlowbit::qmm_sm90
