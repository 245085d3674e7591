// SPDX-License-Identifier: Apache-2.0
//
// Sums of a tile across the cluster: every CTA owns some of the tile's slices, and every warp sends
// what it has of each slice to the owner's shared memory. The owner adds in the order of the
// senders, so that results are the same bits every time.
#pragma once

#include "cuda/qmm_sm90_stream/multiply.cuh"

namespace jaxlowbit::qmm_sm90_stream {

template <class I>
class ClusterReducer {
 public:
  __device__ ClusterReducer(const Params& p, const Share& share, Memory memory)
      : p_(p),
        share_(share),
        memory_(memory),
        owned_(1 << p.plan.owned_shift),
        senders_(p.plan.warps_k << p.plan.cluster_shift) {}

  // One thread, before the tile's sums can be complete.
  __device__ void Expect(int slices) const {
    ArriveExpecting(memory_.sums_full(), Owned(slices) * senders_ * I::kTiles * kFragmentBytes);
  }

  // A warp's sums of slice `slice` of the tile, of its part `part` of the stages.
  __device__ void Send(int slice, int part, const float (&sums)[I::kTiles][4]) const {
    const int owner = slice >> p_.plan.owned_shift;
    const int sender = share_.rank * p_.plan.warps_k + part;
    const uint32_t barrier = MapToRank(memory_.sums_full(), owner);
    const uint32_t target = MapToRank(Fragment(slice & (owned_ - 1), sender, 0), owner);
#pragma unroll
    for (int tile = 0; tile < I::kTiles; ++tile) {
      StoreRemote(target + tile * kFragmentBytes, sums[tile], barrier);
    }
  }

  // All multiplying threads: adds up and stores this CTA's slices of a tile of `slices` that begins
  // with `tile_slice`.
  __device__ void Collect(int tile_slice, int slices) const {
    for (int i = threadIdx.x; i < Owned(slices) * I::kTiles * 32; i += 32 * kWarps) {
      const int lane = i % 32, tile = i / 32 % I::kTiles, slice = i / 32 / I::kTiles;
      float sum[4] = {};
      for (int sender = 0; sender < senders_; ++sender) {
        const uint4 part = LoadShared16(Fragment(slice, sender, tile));
        sum[0] += __uint_as_float(part.x);
        sum[1] += __uint_as_float(part.y);
        sum[2] += __uint_as_float(part.z);
        sum[3] += __uint_as_float(part.w);
      }
      const int n = (tile_slice + share_.rank * owned_ + slice) * kSliceRows + lane / 4;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        Store(tile * 8 + lane % 4 * 2 + j % 2, n + j / 2 * 8, sum[j] * kUnit);
    }
  }

 private:
  static constexpr float kUnit = I::kScaleSums ? 1 << kShift<typename I::T> : 1;  // of sums
  static constexpr int kFragmentBytes = 32 * 16;  // 16 channels x 8 tokens, in the order of lanes

  // Of a tile of `slices`, those that this CTA owns.
  __device__ int Owned(int slices) const {
    return max(0, min(owned_, slices - share_.rank * owned_));
  }

  // Of this lane.
  __device__ uint32_t Fragment(int slice, int sender, int tile) const {
    return memory_.sums() + ((slice * senders_ + sender) * I::kTiles + tile) * kFragmentBytes +
           threadIdx.x % 32 * 16;
  }

  __device__ void Store(int m, int n, float value) const {
    if (m >= p_.m || n >= p_.n) return;
    const int64_t offset = (share_.batch * p_.m + m) * p_.n + n;
    if (p_.out_float) {
      static_cast<float*>(p_.out)[offset] = value;
    } else {
      static_cast<typename I::T*>(p_.out)[offset] = typename I::T(value);
    }
  }

  const Params& p_;
  const Share& share_;
  const Memory memory_;
  const int owned_;    // most slices of a tile that a CTA owns
  const int senders_;  // of sums for a slice
};

}  // namespace jaxlowbit::qmm_sm90_stream
