// SPDX-License-Identifier: Apache-2.0
//
// LhsPath::kRounds: before the first tile, the consumers read the activations of the CTA's part of k, send the maximum
// magnitude of each row to the other CTAs of the cluster, and round to 8 bits. The first activations are loaded before
// any weights. A warp processes columns of one row. Rounded activations have the layout of a stage, without padding
// rows.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::sm90_stream {

class RowRounder {
 public:
  __device__ RowRounder(const Params& p, const Share& share, Memory memory)
      : p_(p), memory_(memory), count_((share.atom_end - share.atom_begin) * kVectors) {
    const int warps_shift = kWarpsShift - (32 - __clz(p.m - 1));  // warps of a row
    const int warp = threadIdx.x / 32;
    row_ = warp >> warps_shift;
    threads_ = 32 << warps_shift;
    thread_ = static_cast<int>(threadIdx.x) & (threads_ - 1);
    warps_shift_ = warps_shift;
    if (row_ >= p.m) count_ = 0;
    source_ = static_cast<const uint4*>(p.original_lhs) +
              ScheduleOf(p).Row(share.batch, row_) * p.k_blocks * kVectors +
              share.atom_begin * kVectors;
    WaitForPreviousKernels();  // they may have written lhs
    Load(thread_);
  }

  // Called by all consumers; afterwards each may read all of the CTA's values and scales.
  __device__ void Round(int rank) {
    uint32_t pairs = 0;  // maximum magnitudes of even and of odd columns
    for (int i = thread_; i < count_;) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (i + j * threads_ >= count_) break;
        const uint4& v = loaded_[j];
        for (uint32_t pair : {v.x, v.y, v.z, v.w}) pairs = __vmaxu2(pairs, pair & 0x7fff7fff);
        StoreShared16(Place(i + j * threads_), v);
      }
      i += kUnroll * threads_;
      Load(i);
    }
    const uint32_t largest = __reduce_max_sync(~0u, max(pairs & 0xffff, pairs >> 16));
    const Divisor divisor(RowMax(largest, rank) << 16,
                          p_.to_float8 ? kMaxValue<true> : kMaxValue<false>);
    if (thread_ == 0) StoreShared4(memory_.row_scale(row_), __float_as_uint(divisor.scale));
    const bool finite = divisor.scale < __uint_as_float(0x7f800000);
#pragma unroll 1
    for (int i = thread_; i < count_; i += threads_) {
      const uint32_t place = Place(i);
      const uint4 v = LoadShared16(place);
      uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t& word : words) {
        const float low = divisor.Quotient(Pair<__nv_bfloat16>::Low(word));
        const float high = divisor.Quotient(Pair<__nv_bfloat16>::High(word));
        word = p_.to_float8 ? RoundWide<true>(low, high) : RoundWide<false>(low, high);
        if (!finite) word = 0;
      }
      StoreShared16(place, make_uint4(words[0], words[1], words[2], words[3]));
    }
    SynchronizeConsumers();
  }

 private:
  static constexpr int kVectors = kRowBytes / kCopyBytes;  // of a row and an atom
  static constexpr int kUnroll = 4;                        // vectors that a thread loads at a time
  static constexpr int kWarpsShift = 3;
  static_assert(1 << kWarpsShift == kWarps);

  __device__ void Load(int first) {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (first + j * threads_ < count_) loaded_[j] = source_[first + j * threads_];
    }
  }

  // The address of vector `i` of the row in shared memory.
  __device__ uint32_t Place(int i) const {
    const int atom = i / kVectors, column = i % kVectors;
    return memory_.base + p_.plan.gathered + (atom * p_.m + row_) * kRowBytes +
           (column ^ row_ % 8) * kCopyBytes;
  }

  // The maximum of the values from the warps of this row in all CTAs of the cluster.
  __device__ uint32_t RowMax(uint32_t own, int rank) const {
    const int ctas = 1 << p_.plan.cluster_shift, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t place = memory_.largest(rank * kWarps + warp), barrier = memory_.largest_full();
    WaitForArrivals();  // the barriers of all CTAs exist
    if (ctas == 1) {
      if (lane == 0) StoreShared4(place, own);
      SynchronizeConsumers();
    } else {
      if (threadIdx.x == 0) ArriveExpecting(barrier, ctas * kWarps * 4);
      if (lane < ctas) StoreRemote(MapToRank(place, lane), own, MapToRank(barrier, lane));
      WaitForCluster(barrier, 0);
    }
    const bool of_row = lane < ctas * kWarps && (lane % kWarps) >> warps_shift_ == row_;
    return __reduce_max_sync(~0u, of_row ? LoadShared4(memory_.largest(lane)) : 0);
  }

  const Params& p_;
  const Memory memory_;
  int count_;                                 // vectors of the CTA's part of the row
  int row_, threads_, thread_, warps_shift_;  // of the row
  const uint4* source_;
  uint4 loaded_[kUnroll];
};

}  // namespace jaxlowbit::sm90_stream
