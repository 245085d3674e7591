// SPDX-License-Identifier: Apache-2.0
//
// The kernel, and its instances by what they are made for. Every file that includes this compiles
// those of one type of lhs and one width.
#pragma once

#include <utility>

#include "cuda/qmm_sm90/fill.cuh"
#include "cuda/qmm_sm90/instances.h"
#include "cuda/qmm_sm90/multiply.cuh"
#include "cuda/qmm_sm90/params.cuh"
#include "cuda/qmm_sm90/store.cuh"

namespace jaxlowbit::qmm_sm90 {
namespace {

// One warp. (Elsewhere the kernel is empty: it only runs on sm_90.)
template <class I>
[[maybe_unused]] __device__ void InitBarriers(const Plan& plan, int mate_shift, Memory memory) {
  const int lane = threadIdx.x % 32;
  if (lane < plan.num_stages) {
    InitBarrier(memory.full(lane), 1);
    InitBarrier(memory.empty(lane), I::kWarps << mate_shift);
  } else if (lane == kMaxStages) {
    InitBarrier(memory.sums_full(), 1);
  }
  PublishBarriers();
}

template <class I>
__global__ void __launch_bounds__(I::kThreads, I::kTile.ctas_per_sm)
    QmmSm90Kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(kBoxBytes) uint8_t shared[];
  const Memory memory = {Keep(SharedAddress(shared))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == I::kWarps) InitBarriers<I>(p.plan, p.mate_shift, memory);
  __syncthreads();  // barriers exist
  ArriveAtCluster();
  LaunchDependents();
  const Share share = OwnShare(p, I::kStageAtoms);
  const int cluster_shift = p.mate_shift + p.split_shift;
  const int cluster = blockIdx.x >> cluster_shift, clusters = gridDim.x >> cluster_shift;
  const auto tile_of = [&](int number) {
    Tile tile = TileOf(p, number, I::kCtaStrips << p.mate_shift, I::kTokens);
    tile.strip += share.mate * I::kCtaStrips;
    return tile;
  };
  RingCursor cursor = {0, 0};
  if (warp >= I::kWarps) {
    ReleaseRegisters<I::kCopyRegisters>();
    WaitForArrivals();  // barriers of all CTAs exist
    if (warp == I::kWarps) {
      WaitForPreviousKernels();
      StageFiller<I> filler(p, share, memory);
      for (int number = cluster; number < p.num_tiles; number += clusters) {
        filler.Fill(tile_of(number), cursor);
      }
    }
    __syncwarp();
    if (p.split_shift > 0) {
      ArriveAtCluster();
      WaitForArrivals();
    }
  } else {
    AcquireRegisters<I::kMultiplyRegisters>();
    const TileMultiplier<I> multiplier(p, share, memory);
    TileStorer<I> storer(p, share, memory);
    if (p.split_shift > 0 && threadIdx.x == 0) storer.Expect();
    WaitForArrivals();
    Sums<I> sums;
    for (int number = cluster; number < p.num_tiles; number += clusters) {
      const Tile tile = tile_of(number);
      multiplier.Multiply(sums, cursor);
      if (p.split_shift > 0) {  // the cluster has one tile
        ArriveAtCluster();
        WaitForArrivals();  // every CTA has read its ring
        storer.Reduce(tile, sums);
      } else {
        storer.Store(tile, sums);
      }
    }
    storer.Finish();
  }
  if (p.mate_shift > 0) {  // nothing is still to arrive here
    ReleaseToCluster();
    WaitForArrivals();
  }
#endif
}

template <typename T, typename S, ZeroKind kZero, int kBits, int... kNumbers>
KernelFunction Find(int tile, std::integer_sequence<int, kNumbers...>) {
  const KernelFunction kernels[] = {QmmSm90Kernel<Instance<T, S, kZero, kBits, kNumbers>>...};
  return kernels[tile];
}

template <typename T, typename S, int kBits>
KernelFunction Find(ZeroKind zero, int tile) {
  constexpr auto kNumbers = std::make_integer_sequence<int, kNumTiles>{};
  return zero == ZeroKind::kNone      ? Find<T, S, ZeroKind::kNone, kBits>(tile, kNumbers)
         : zero == ZeroKind::kInteger ? Find<T, S, ZeroKind::kInteger, kBits>(tile, kNumbers)
                                      : Find<T, S, ZeroKind::kFloat, kBits>(tile, kNumbers);
}

}  // namespace

template <typename T, int kBits>
KernelFunction FindKernel(bool float_scales, ZeroKind zero, int tile) {
  return float_scales ? Find<T, float, kBits>(zero, tile) : Find<T, T, kBits>(zero, tile);
}

}  // namespace jaxlowbit::qmm_sm90
