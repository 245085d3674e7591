// SPDX-License-Identifier: Apache-2.0
//
// Geometry of qmm_sm90, shared by device code and selection: tiles, stages, shared memory, the stream-K schedule.
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

// A CTA's tile. A strip is 64 output channels, the M of one wgmma.
struct TileShape {
  int m;            // rows of lhs
  int strips;       // of a consumer warpgroup
  int warpgroups;   // consumers; one more is the producer
  int ctas_per_sm;  // that share registers and shared memory
  int stage_atoms;  // atoms of k per stage

  constexpr int cta_strips() const { return strips * warpgroups; }
  // Large tiles with two atoms per stage leave little shared memory for results.
  constexpr bool has_large_stages() const { return stage_atoms == 2 && m > 160; }
  // Strips of the gate and of up alternate. With one strip per warpgroup, each of two warpgroups finishes half of the
  // rows and exchanges the other accumulators through shared memory, next to the stages. 224 rows do not fit; 256 rows
  // with two atoms per stage are only for an 8-bit lhs.
  constexpr bool supports_gated() const {
    const bool fits = m <= 192 || m == 256 || !has_large_stages();
    const bool halves = m % (2 * kStoreStep) == 0 && fits;
    return cta_strips() % 2 == 0 && (strips == 2 || halves);
  }
  // Whether the tile supports an 8-bit lhs. A 128-byte row of its blocks is two atoms of k, so a stage must have two.
  // Registers must fit the partial sums of a group in addition to the accumulators (unless int8 accumulates over all of
  // k: `single_accumulator`), and the sums for zeros. A single warpgroup is not faster beyond 128 rows.
  constexpr bool supports_8bit_lhs(bool single_accumulator, bool zeros) const {
    const int with_zeros = single_accumulator ? 192 : 160, without = single_accumulator ? 256 : 192;
    const int max_rows = warpgroups == 1 ? 128 : zeros ? with_zeros : without;
    return stage_atoms == 2 && warpgroups <= 2 && m * strips <= max_rows;
  }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
};

inline constexpr TileShape kTiles[] = {
    {256, 1, 2, 1, 1}, {128, 1, 2, 1, 2}, {64, 1, 1, 2, 2},  {64, 2, 1, 2, 2},  {32, 2, 1, 2, 2},
    {128, 1, 3, 1, 2}, {128, 1, 1, 1, 2}, {48, 2, 1, 2, 2},  {80, 1, 2, 1, 2},  {96, 1, 2, 1, 2},
    {96, 1, 1, 2, 2},  {112, 1, 2, 1, 2}, {144, 1, 2, 1, 2}, {160, 1, 2, 1, 2}, {192, 1, 2, 1, 2},
    {224, 1, 2, 1, 2}, {80, 2, 2, 1, 2},  {160, 1, 1, 1, 2}, {256, 1, 2, 1, 2}};
// All instances of the first kPrebuiltTiles tiles are prebuilt. The others, intermediate sizes, are prebuilt only for
// the most common format and JIT-compiled for the rest (instances.h).
inline constexpr int kPrebuiltTiles = 7;
// The first kFloatTiles tiles support a 16-bit lhs too, the others only an 8-bit lhs.
inline constexpr int kFloatTiles = 18;
inline constexpr int kNumTiles = static_cast<int>(std::size(kTiles));
inline constexpr int kMaxWarpgroups = 3;
inline constexpr int kMinTileM = 32;
// Maximum rows of tiles that load the scales of microscaling formats once per stage. Larger tiles lack the registers.
inline constexpr int kMaxMicroscaledRows = 160;

inline constexpr int kPeers[] = {1, 2};  // CTAs of a cluster, which share lhs by multicast
inline constexpr int kMaxSplits = 8;     // of k, in the stream-K tail
inline constexpr int kMaxStages = 8;
inline constexpr int kTmaAlignment = 1024;  // of a swizzled tensor-map tile in shared memory
inline constexpr int kTmaTarget = 128;      // of other TMA loads
inline constexpr int kBarriersBytes = 256;
// Ragged: the producer passes tiles on to the consumers. It is at most a ring of stages ahead of them.
inline constexpr int kTileRecords = kMaxStages + 2, kTileRecordBytes = 16;
static_assert(kBarriersBytes + kTileRecords * kTileRecordBytes <= kTmaAlignment);
inline constexpr int kStoreBuffers = 4;
// Store buffers for results. With an epilogue, the others contain accumulators.
inline constexpr int kResultBuffers = 2;

// The largest multiple of kStoreStep up to `max_rows` that divides `rows`.
constexpr int LargestStoreRows(int rows, int max_rows) {
  while (max_rows > kStoreStep && (rows % max_rows != 0 || max_rows % kStoreStep != 0)) --max_rows;
  return max_rows;
}

// Rows that a warpgroup stores at a time. Fewer rows leave more shared memory for stages.
constexpr int StoreRows(const TileShape& tile) {
  return LargestStoreRows(tile.m, tile.warpgroups > 2 || tile.has_large_stages() ? 32 : 64);
}

// The rows per store if each of two warpgroups finishes half of the rows of a gated tile.
constexpr int GatedStoreRows(const TileShape& tile) {
  return LargestStoreRows(tile.m / 2, StoreRows(tile));
}

// Bytes of a warpgroup's results: the store buffers or, if two warpgroups share the rows of a gated tile, half of its
// accumulators if that is larger.
constexpr int ResultBytes(const TileShape& tile) {
  const int buffers = kStoreBuffers * StoreRows(tile) * static_cast<int>(kAtom) * 2;
  const int half = tile.m / 2 * static_cast<int>(kAtom) * 4;
  return tile.supports_gated() && tile.strips == 1 && half > buffers ? half : buffers;
}

// Whether the kernel supports groups of 16 in this format: codebooks and 8-bit scales.
constexpr bool SupportsGroupsOf16(Codebook codebook, int64_t scale_bytes) {
  return codebook != Codebook::kNone || scale_bytes == 1;
}

// A stage in shared memory: lhs and packed weights in one slot; scales and zeros in another.
struct StageBytes {
  int lhs, packed, scales, zeros;
};

struct Plan {
  int stages;        // of all of k
  int stage_groups;  // maximum per stage
  StageBytes bytes;
  int slot_bytes;    // lhs and packed weights; a multiple of their alignment, so without padding
  int scales_bytes;  // scales and zeros, in multiples of kTmaTarget
  int ring, scales;  // offsets of the first stage's slots
  int num_stages;    // of the ring; the plan cannot run with fewer than 2
  int groups_bytes;  // ragged: the table of groups, behind the stages

  constexpr int shared_bytes() const { return scales + num_stages * scales_bytes + groups_bytes; }
};

Plan PlanOf(const QuantizedMatmul& problem, const TileShape& tile);

// The stream-K schedule of persistent CTAs. First the same number of whole tiles for every CTA; then the remaining
// tiles, the tail, split along k so that every CTA has a part. Tile counts are tiles of clusters. Clusters of several
// peers do not split the tail.
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
