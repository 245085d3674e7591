// SPDX-License-Identifier: Apache-2.0
//
// Geometry of qmm_sm90: tiles, stages, shared memory and the stream-K schedule as numbers, for the device code and for
// the selection.
#pragma once

#include <cstdint>
#include <iterator>

#include "cuda/gpu.h"
#include "cuda/types.h"

namespace jaxlowbit {
struct QuantizedMatmul;
}

namespace jaxlowbit::sm90 {

inline constexpr int kStoreStep = 16;  // rows that a warpgroup stores are a multiple of this

// What a CTA computes at a time. A strip is 64 output channels, the M of one wgmma.
struct TileShape {
  int m;            // rows of lhs
  int strips;       // of a consumer warpgroup
  int warpgroups;   // consumers; one more is the producer
  int ctas_per_sm;  // that share registers and shared memory
  int stage_atoms;  // of k, of a stage

  constexpr int cta_strips() const { return strips * warpgroups; }
  // Large tiles with two atoms in a stage leave little shared memory to results.
  constexpr bool has_large_stages() const { return stage_atoms == 2 && m > 160; }
  // Strips of the gate and of up alternate. Two warpgroups of a strip each finish half of the rows, whose accumulators
  // shared memory has to hold beside the stages: those of 224 rows leave no room, those of 256 are for 8 bits alone.
  constexpr bool takes_gated() const {
    const bool fits = m <= 192 || m == 256 || !has_large_stages();
    const bool halves = m % (2 * kStoreStep) == 0 && fits;
    return cta_strips() % 2 == 0 && (strips == 2 || halves);
  }
  // Whether it takes an lhs of 8 bits, of which a block, 128 bytes of a row, is two atoms of k: a stage. Registers hold the
  // sums of groups beside those of results, unless `one_sum` says that int8 is summed over all of k, and zeros, if weights
  // have them. A warpgroup alone gains nothing beyond 128 rows.
  constexpr bool takes_bytes(bool one_sum, bool zeros) const {
    const int beside_zeros = one_sum ? 192 : 160, without = one_sum ? 256 : 192;
    const int most = warpgroups == 1 ? 128 : zeros ? beside_zeros : without;
    return stage_atoms == 2 && warpgroups <= 2 && m * strips <= most;
  }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
};

inline constexpr TileShape kTiles[] = {
    {256, 1, 2, 1, 1}, {128, 1, 2, 1, 2}, {64, 1, 1, 2, 2},  {64, 2, 1, 2, 2},  {32, 2, 1, 2, 2},
    {128, 1, 3, 1, 2}, {128, 1, 1, 1, 2}, {48, 2, 1, 2, 2},  {80, 1, 2, 1, 2},  {96, 1, 2, 1, 2},
    {96, 1, 1, 2, 2},  {112, 1, 2, 1, 2}, {144, 1, 2, 1, 2}, {160, 1, 2, 1, 2}, {192, 1, 2, 1, 2},
    {224, 1, 2, 1, 2}, {80, 2, 2, 1, 2},  {160, 1, 1, 1, 2}, {256, 1, 2, 1, 2}};
// The build holds every instance of the first tiles. It holds the others, which fill the gaps between these, for what
// most programs run; the rest is compiled where it runs (instances.h).
inline constexpr int kBuiltTiles = 7;
// The first tiles take an lhs of 16 bits too; the others are for 8 bits alone.
inline constexpr int kFloatTiles = 18;
inline constexpr int kNumTiles = static_cast<int>(std::size(kTiles));
inline constexpr int kMaxWarpgroups = 3;
inline constexpr int kMinTileM = 32;
// Rows of the largest tiles that have registers for loading the scales of microscaling formats once per stage.
inline constexpr int kMostMicroscaledRows = 160;

inline constexpr int kPeers[] = {1, 2};  // CTAs of a cluster, which share lhs by multicast
inline constexpr int kMaxSplits = 8;     // of k, in the stream-K tail
inline constexpr int kMaxStages = 8;
inline constexpr int kTmaAlignment = 1024;  // of a swizzled tensor-map tile in shared memory
inline constexpr int kTmaTarget = 128;      // of others
inline constexpr int kBarriersBytes = 256;
inline constexpr int kStoreBuffers = 4;
// The store buffers that hold results; with an epilogue, accumulators wait in the others.
inline constexpr int kResultBuffers = 2;

// The largest multiple of kStoreStep up to `most` that divides `rows`.
constexpr int LargestStoreRows(int rows, int most) {
  while (most > kStoreStep && (rows % most != 0 || most % kStoreStep != 0)) --most;
  return most;
}

// Rows that a warpgroup stores at a time; fewer leave more shared memory to the stages.
constexpr int StoreRows(const TileShape& tile) {
  return LargestStoreRows(tile.m, tile.warpgroups > 2 || tile.has_large_stages() ? 32 : 64);
}

// Rows that a warpgroup stores at a time if two warpgroups finish a gated tile, each half of its rows.
constexpr int GatedStoreRows(const TileShape& tile) {
  return LargestStoreRows(tile.m / 2, StoreRows(tile));
}

// Bytes in which a warpgroup puts results: store buffers, and half of the accumulators of a tile whose rows two
// warpgroups share.
constexpr int ResultBytes(const TileShape& tile) {
  const int buffers = kStoreBuffers * StoreRows(tile) * static_cast<int>(kAtom) * 2;
  const int half = tile.m / 2 * static_cast<int>(kAtom) * 4;
  return tile.takes_gated() && tile.strips == 1 && half > buffers ? half : buffers;
}

// Whether the kernel takes groups of 16: of codebooks, and of scales of 8 bits.
constexpr bool HasSixteens(Codebook codebook, int64_t scale_bytes) {
  return codebook != Codebook::kNone || scale_bytes == 1;
}

// A stage in shared memory: lhs and packed weights in one slot; scales and zeros in another.
struct StageBytes {
  int lhs, packed, scales, zeros;
};

struct Plan {
  int stages;        // of all of k
  int stage_groups;  // the most that a stage touches
  StageBytes bytes;
  int slot_bytes;    // lhs and packed weights: aligned as they are, so the ring wastes nothing
  int scales_bytes;  // scales and zeros, in multiples of kTmaTarget
  int ring, scales;  // offsets of the first stage's slots
  int num_stages;    // of the ring; the plan cannot run with fewer than 2

  constexpr int shared_bytes() const { return scales + num_stages * scales_bytes; }
};

Plan PlanOf(const QuantizedMatmul& problem, const TileShape& tile);

// The stream-K schedule of persistent CTAs: first whole tiles, the same number for every CTA; the tiles that are left,
// the tail, are split along k, so that every CTA has a part of them. Tiles are counted in those of clusters; peers
// do not split theirs.
struct StreamK {
  int64_t resident;     // clusters that run at a time
  int64_t whole_tiles;  // all of them if splits is 1
  int64_t tail_tiles;
  int splits;  // of a tail tile

  constexpr int64_t tasks() const { return whole_tiles + tail_tiles * splits; }
  constexpr int64_t workspace_bytes(const TileShape& tile) const {
    return tail_tiles * splits * tile.m * tile.cta_strips() * kAtom *
           static_cast<int64_t>(sizeof(float));
  }
};

StreamK StreamKOf(const QuantizedMatmul& problem, const TileShape& tile, int peers, int splits,
                  int num_sms);

}  // namespace jaxlowbit::sm90
