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
#include "cuda/qmm_sm90/reduce.cuh"
#include "cuda/qmm_sm90/store.cuh"

namespace jaxlowbit::qmm_sm90 {
namespace {

// One warp. (Elsewhere the kernel is empty: it only runs on sm_90.)
template <class I>
[[maybe_unused]] __device__ void InitBarriers(const Plan& plan, int mate_shift, Memory memory) {
  const int lane = threadIdx.x % 32;
  if (lane < plan.num_stages) {
    InitBarrier(memory.full(lane), 1);
    InitBarrier(memory.empty(lane), I::kWarps * kWarpArrivals << mate_shift);
  } else if (lane == kMaxStages) {
    for (int i = 0; i < kResultBuffers * I::kTile.warpgroups; ++i) {
      InitBarrier(memory.residual_full(0, i), 1);
    }
    InitBarrier(memory.taken(), 4 * kWarpArrivals);
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
  const int mate = ClusterRank();
  const int cluster = blockIdx.x >> p.mate_shift, clusters = gridDim.x >> p.mate_shift;
  RingCursor cursor = {0, 0};
  if (warp >= I::kWarps) {
    if constexpr (I::kMovesRegisters) ReleaseRegisters<I::kCopyRegisters>();
    WaitForArrivals();  // barriers of all CTAs exist
    if (warp == I::kWarps) {
      WaitForPreviousKernels();
      StageFiller<I> filler(p, mate, memory);
      for (int number = cluster; number < p.num_tasks; number += clusters) {
        filler.Fill(TaskOf<I>(p, number, mate), cursor);
      }
    }
    __syncwarp();
  } else {
    if constexpr (I::kMovesRegisters) AcquireRegisters<I::kMultiplyRegisters>();
    const TileMultiplier<I> multiplier(p, memory);
    TileStorer<I> storer(p, memory);
    WaitForArrivals();
    WaitForPreviousKernels();
    Sums<I> sums;
    Factors<I> factors;
    for (int number = cluster; number < p.num_tasks; number += clusters) {
      const Task task = TaskOf<I>(p, number, mate);
      if (task.divided < 0) storer.Begin(task.tile);
      multiplier.Multiply(task, sums, factors, cursor);
      if (task.divided < 0) {
        storer.Store(task.tile, sums, factors);
      } else {
        StorePart<I>(p, task.divided, sums, factors);
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
