// SPDX-License-Identifier: Apache-2.0
//
// Shared by the consumers of qmm_sm90: accumulators, a lane's offsets in a stage, and the release of stages to the
// producers.
#pragma once

#include "cuda/device/packed.cuh"
#include "cuda/kernels/sm90/params.cuh"

namespace jaxlowbit::sm90 {

template <class I>
using Accumulators = float[I::kStrips][I::kM / 2];

// Factors of the accumulators of each strip: this lane's channels g and g + 8.
template <class I>
using Factors = float[I::kStrips][2];

// Loads the tensor scales of this lane's channels of a tile; 1 for channels out of bounds.
template <class I>
__device__ void LoadUnits(const Params& p, const Tile& tile, Factors<I>& units) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128, lane = threadIdx.x % 32;
  const bool gated = p.epilogue.gated;
#pragma unroll
  for (int s = 0; s < I::kStrips; ++s) {
    const int strip = tile.strip + warpgroup * I::kStrips + s;
    const int64_t product = ScheduleOf<I>(p, tile).Position(tile.batch, strip);
    const int n = (gated ? strip / 2 : strip) * static_cast<int>(kAtom) +
                  static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) units[s][h] = LoadUnit(p.units, product, p.n, n + 8 * h);
  }
}

template <class I>
class StageConsumer {
 protected:
  static constexpr int kStripBytes = I::kStageAtoms * kAtomBytes<I::kBits>;

  __device__ StageConsumer(const Params& p, Memory memory) : p_(p), memory_(memory) {
    const int strip = threadIdx.x / 128 * I::kStrips, warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    packed_ =
        Opaque(p.plan.bytes.lhs + strip * kStripBytes + FirstTmaWord<I::kBits>(warp * 32 + lane));
    row_ = Opaque(strip * p.plan.stage_groups * static_cast<int>(kAtom) + warp * 16 + lane / 4 * 2);
    strip_rows_ = Opaque(p.plan.stage_groups * static_cast<int>(kAtom));
    if constexpr (kWarpArrivals == 1) {
      const int rank = p.peer_shift == 0 ? ClusterRank() : lane;
      free_ = Opaque(lane < 1 << p.peer_shift ? MapToRank(memory.empty(0), rank) : 0);
    } else {
      free_ = p.peer_shift > 0 ? MapToRank(memory.empty(0), ClusterRank() ^ 1) : 0;
    }
  }

  // Releases a stage that this warp has read, so that the producers of all peers may overwrite it; does nothing if
  // `slot` is negative. Call after a wait for the warp's products, in all lanes.
  __device__ void Free(int slot) const {
    if constexpr (kWarpArrivals != 1) {
      if (slot >= 0) Arrive(memory_.empty(slot));
    }
    ArriveRemoteAfterReads(free_ + slot * kBarrierBytes, slot >= 0 && free_ != 0);
  }

  const Params& p_;
  const Memory memory_;
  // This lane's offsets in a stage for the warpgroup's first strip: packed weights in bytes, scales in rows.
  int packed_, row_, strip_rows_;

 private:
  uint32_t free_;  // the peer's barrier that this lane signals for free stages, or 0
};

}  // namespace jaxlowbit::sm90
