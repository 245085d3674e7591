// SPDX-License-Identifier: Apache-2.0
//
// What a normalization (ScaledRows in problem.h) costs outside of sums and their epilogue. The copying warp
// does it while the others multiply.
#pragma once

#include "cuda/qmm_sm90_stream/params.cuh"

namespace jaxlowbit::qmm_sm90_stream {

// A load of 16 bytes has the sums of squares of an atom.
static_assert(kAtom == 4 * kSquaresChannels);

// Of lhs, whose rows are scaled and not normalized: 1 / sqrt(mean of squares + epsilon) of each. The
// kernels before this one have ended. Several rows at a time, whose loads are then under way together.
__device__ inline void StoreFactors(const Params& p, const Share& share, Memory memory) {
  constexpr int kRows = 8;
  const int lane = threadIdx.x % 32;
  const float4* squares = p.norm.lhs_squares + int64_t{share.batch} * p.m * p.k_blocks;
#pragma unroll 1
  for (int first = 0; first < p.m; first += kRows) {
    float sums[kRows] = {};
#pragma unroll 2
    for (int atom = lane; atom < p.k_blocks; atom += 32) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + i >= p.m) continue;
        const float4 v = __ldcg(squares + int64_t{first + i} * p.k_blocks + atom);
        sums[i] += (v.x + v.y) + (v.z + v.w);
      }
    }
    float own = 0;  // of row `first` + lane
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        sums[i] += __shfl_xor_sync(~0u, sums[i], lanes);
      }
      if (lane == i) own = sums[i];
    }
    const float factor = rsqrtf(own / static_cast<float>(p.k_blocks * kAtom) + p.norm.epsilon);
    if (lane < kRows) {
      *static_cast<float*>(__cvta_shared_to_generic(memory.factor(first + lane))) = factor;
    }
  }
}

// Of the results: their scales into L2, so that the end of a tile does not wait for memory.
__device__ inline void PrefetchScales(const Params& p, const Share& share) {
  const int slice = share.slice_begin + static_cast<int>(threadIdx.x % 32);
  if (slice >= share.slice_end) return;
  const void* scales = static_cast<const uint16_t*>(p.norm.scale) + slice * kSliceRows;
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(scales));
}

}  // namespace jaxlowbit::qmm_sm90_stream
