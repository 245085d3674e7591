// SPDX-License-Identifier: Apache-2.0
//
// How qmm_sm90_stream divides a product, as numbers, for the kernel and for the selection, which has
// no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit::qmm_sm90_stream {

inline constexpr int kSliceRows = 16;      // output channels of one instruction: a slice
inline constexpr int kSlicesPerStrip = 4;  // of the 64 channels of an atom
inline constexpr int kWarps = 8;           // that multiply; one more copies
inline constexpr int kSlicesPerWarp = 2;
inline constexpr int kMaxTileSlices = kWarps * kSlicesPerWarp;
inline constexpr int kMaxClusterSlices = 2 * kMaxTileSlices;
inline constexpr int kMaxStages = 16;
inline constexpr int kMaxCtasPerSm = 2;
inline constexpr int kMaxParts = 4;         // products of one launch
inline constexpr int kBoxBytes = 1024;      // alignment of boxes of activations
inline constexpr int kBarriersBytes = 512;  // room for all barriers, at the start

// Most shared memory of a CTA: of 228 KiB, 1 KiB for the system.
constexpr int SharedBytes(int ctas_per_sm) { return (228 / ctas_per_sm - 1) * 1024; }

// Most codes in a CTA's ring: with more of them on their way, all take longer.
inline constexpr int kMostCodeBytes = 64 * 1024;

// A CTA that shall have a multiprocessor to itself takes more than half of it, so that two never meet where
// they start before an earlier kernel has left all others; but, if a ring of these stages fits, no more
// than leaves room for a CTA of the next kernel, whose weights are then there when this one ends.
inline constexpr int kAloneBytes = 117 * 1024;
inline constexpr int kAloneStages = 3;

// Of permuted activations, most shared memory for what a CTA gathers itself, and for the rows that it gathers
// from: more would leave too little for weights.
inline constexpr int kMostGatheredBytes = 24 * 1024;

// Of 8-bit weights, 32 tokens would take more registers than there are.
constexpr int MaxTokens(int bits) { return bits == 4 ? 32 : 16; }

// Slices of a gated product are those of a strip of the gate, then of the same strip of up.
inline constexpr int kPairSlices = 2 * kSlicesPerStrip;

// Tokens that the instances are compiled for.
constexpr int TileTokens(int64_t m) { return m <= 8 ? 8 : m <= 16 ? 16 : 32; }

// A stage in shared memory: activations, unless they are gathered, codes, scales, zeros, in this order.
struct StageBytes {
  int lhs, codes, scales, zeros;
  constexpr int total() const { return lhs + codes + scales + zeros; }
};

// The plan of one product. A cluster owns `slices` neighbouring slices of channels, worked on in
// tiles of up to `tile_slices`; each of its CTAs owns a part of k, in stages of `stage_atoms`
// atoms.
struct Plan {
  int cluster_shift;  // a cluster is 2^cluster_shift CTAs
  int slices, tile_slices;
  int warps_k;                     // parts of a stage's k; the warps of each divide the slices
  int stage_shift, stage_atoms;    // 2^stage_shift atoms along k
  int warp_atoms;                  // of those, neighbours that one warp multiplies
  int stages;                      // of all of k
  int stage_groups, stage_strips;  // most that a stage touches
  StageBytes bytes;
  int slot_bytes;   // bytes.total()
  int owned_shift;  // a CTA adds up 2^owned_shift slices of a tile, or fewer
  bool gathers;     // permuted activations are gathered by each CTA, for its part of k
  int lhs_rows;     // of activations and an atom in shared memory: the instance's tokens, or fewer
  int gathered, rows;  // if so: where they are, and whole rows to gather from
  int ring;            // where the stages begin
  int num_stages;      // depth of the ring; below 2: not to be run
  int shared_bytes;    // of a CTA
};

// A stage begins with a group, or lies in one.
inline bool SupportsGroupSize(const Plan& plan, int64_t size) {
  const int64_t stage_k = plan.stage_atoms * kAtom;
  return size < 0 || size == 16 || size == 32 ||
         (size % kAtom == 0 && (stage_k % size == 0 || size % stage_k == 0));
}

// What a cluster owns is a multiple of this many slices: whole strips, whose copies are the largest.
constexpr int SliceStep(const QuantizedMatmul& problem) {
  return problem.epilogue.gated ? kPairSlices : kSlicesPerStrip;
}

inline Plan PlanOf(const QuantizedMatmul& problem, int cluster_ctas, int slices, int ctas_per_sm) {
  Plan plan = {};
  while (2 << plan.cluster_shift <= cluster_ctas) ++plan.cluster_shift;
  plan.slices = slices;
  const int tiles = static_cast<int>(CeilDiv(slices, kMaxTileSlices));
  plan.tile_slices = static_cast<int>(CeilDiv(slices, tiles));
  if (problem.epilogue.gated) {
    plan.tile_slices = static_cast<int>(CeilDiv(plan.tile_slices, kPairSlices)) * kPairSlices;
  }
  const int tokens = TileTokens(problem.m);
  const int pairs = static_cast<int>(CeilDiv(plan.tile_slices, kSlicesPerWarp));
  plan.warps_k = 1;
  const int most = tokens == 32 ? 4 : kWarps;  // the sums of more would leave no room for stages
  while (pairs * plan.warps_k * 2 <= kWarps && plan.warps_k * 2 <= most) plan.warps_k *= 2;
  // Two atoms for a warp, if activations leave room for several stages; of a strip, no more than 16 KiB.
  plan.stage_atoms =
      std::max(plan.warps_k, std::min({2 * plan.warps_k, 128 / tokens, 32 / problem.bits}));
  plan.warp_atoms = plan.stage_atoms / plan.warps_k;
  while (1 << plan.stage_shift < plan.stage_atoms) ++plan.stage_shift;
  plan.stages = static_cast<int>(CeilDiv(problem.k_blocks(), plan.stage_atoms));
  const int64_t stage_k = plan.stage_atoms * kAtom, size = problem.group_size;
  plan.stage_groups = static_cast<int>(size < 0 ? 1 : CeilDiv(stage_k, size));
  plan.stage_strips =
      (plan.tile_slices + 2 * (kSlicesPerStrip - 1)) / kSlicesPerStrip;  // wherever it begins
  const int per_slice = kSliceRows * static_cast<int>(kAtom) * problem.bits / 8;
  const int per_group = plan.stage_strips * plan.stage_groups * static_cast<int>(kAtom);
  const int cluster = 1 << plan.cluster_shift;
  const int64_t row_bytes = problem.m * 2;  // of an element of k
  const int64_t gathered_bytes = CeilDiv(plan.stages, cluster) * stage_k * row_bytes;
  const int64_t gather_bytes = gathered_bytes + problem.k * row_bytes;
  plan.gathers = problem.orders > 0 && problem.lhs_aligned && tokens == 8 &&
                 gather_bytes <= kMostGatheredBytes;
  // Boxes of one token have no rows but its: those that do not exist take the copy engine longer than others.
  plan.lhs_rows = plan.gathers || problem.m == 1 ? static_cast<int>(problem.m) : tokens;
  plan.bytes = {plan.gathers ? 0 : plan.stage_atoms * plan.lhs_rows * static_cast<int>(kAtom) * 2,
                plan.stage_atoms * plan.tile_slices * per_slice,
                per_group * static_cast<int>(problem.scale_bytes()),
                per_group * static_cast<int>(problem.zero_bytes())};
  plan.slot_bytes = static_cast<int>(CeilDiv(plan.bytes.total(), kBoxBytes) * kBoxBytes);
  while (cluster << plan.owned_shift < plan.tile_slices) ++plan.owned_shift;
  // Every warp that has a part of a slice's sum sends it: 16 channels x tokens in float32.
  const int senders = cluster * plan.warps_k;
  const int sums = (senders << plan.owned_shift) * kSliceRows * tokens * 4;
  plan.gathered = kBarriersBytes + sums;
  plan.rows = plan.gathered + (plan.gathers ? static_cast<int>(gathered_bytes) : 0);
  const int64_t before = plan.gathered + (plan.gathers ? gather_bytes : 0);
  plan.ring = static_cast<int>(CeilDiv(before, kBoxBytes) * kBoxBytes);
  const bool alone = ctas_per_sm == 1;
  const bool leaves_room = plan.ring + kAloneStages * plan.slot_bytes <= kAloneBytes;
  const int bytes = alone && leaves_room ? kAloneBytes : SharedBytes(ctas_per_sm);
  plan.num_stages = std::min({kMaxStages, (bytes - plan.ring) / plan.slot_bytes,
                              std::max(2, kMostCodeBytes / plan.bytes.codes)});
  plan.shared_bytes = alone ? bytes : plan.ring + plan.num_stages * plan.slot_bytes;
  return plan;
}

}  // namespace jaxlowbit::qmm_sm90_stream
