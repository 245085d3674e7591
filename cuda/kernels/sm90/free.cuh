// SPDX-License-Identifier: Apache-2.0
//
// How consumers give stages back to the producers that fill them.
#pragma once

#include "cuda/kernels/sm90/params.cuh"

namespace jaxlowbit::sm90 {

class StageReleaser {
 public:
  __device__ StageReleaser(const Params& p, Memory memory) : memory_(memory) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWarpArrivals == 1) {
      const int rank = p.peer_shift == 0 ? ClusterRank() : lane;
      free_ = Keep(lane < 1 << p.peer_shift ? MapToRank(memory.empty(0), rank) : 0);
    } else {
      free_ = p.peer_shift > 0 ? MapToRank(memory.empty(0), ClusterRank() ^ 1) : 0;
    }
  }

  // Releases a stage that this warp has read, so that the producers of all peers may overwrite it; none if `slot` is
  // negative. All lanes come from a wait for the warp's products.
  __device__ void Free(int slot) const {
    if constexpr (kWarpArrivals != 1) {
      if (slot >= 0) Arrive(memory_.empty(slot));
    }
    ArriveRemoteAfterReads(free_ + slot * kBarrierBytes, slot >= 0 && free_ != 0);
  }

 private:
  const Memory memory_;
  uint32_t free_;  // the peer's barrier that this lane tells of free stages, or 0
};

}  // namespace jaxlowbit::sm90
