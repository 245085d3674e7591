// SPDX-License-Identifier: Apache-2.0
//
// walk: one launch for the products and normalizations between two attentions of a decoder: o, gate and up, down, and q,
// k, v of the next layer, for one or two rows of bfloat16 and 4 bits in groups of 128 (docs/kernels/decode.md). In the
// driver, of all layers, with a stand-in for attention: o multiplies the first columns of q, k, v.
//
// Bound: memory. 112.5 MB a layer of 8B are 37.5 us at 3.0 TB/s. Separate kernels stop the stream between two products;
// here weights of the next steps keep arriving while a step ends.
//
//   warps 0 to 8 g - 1, consumers: wait for the rows of the step before ─► normalize ─► for each page of the step: wait
//                                  ─► multiply ─► free it; for each unit: send partial sums (walk_rows, walk_multiply)
//   warp 8 g, the producer:        pages of all steps of all layers through one ring              (walk_fill)
//   warp 8 g + 1, the collector:   add partial sums of a unit ─► epilogue ─► store entries       (walk_collect)
//
// A cluster of two CTAs owns units, each CTA half of k. A step's results are entries of two columns and an epoch, polled
// by all readers: no fence and no reset. A result of layer l is overwritten in layer l + 1 only after steps that all
// its readers had to complete, so that one buffer a step suffices.
//
// PDL: consumers and collector wait for earlier kernels before all else, the producer never does.
//
// Limits: UnsupportedWalk in walk_shape.h. All CTAs must be resident, since they wait for each other.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/kernels/sm90_stream/walk_collect.cuh"
#include "cuda/kernels/sm90_stream/walk_fill.cuh"

namespace jaxlowbit::sm90_stream::walk {

__device__ inline void InitBarriers(const Params& p, Memory memory) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < p.pages) {
    InitBarrier(memory.full(lane), 1);
    InitBarrier(memory.empty(lane), 8);
  } else if (lane > kMaxPages && lane <= kMaxPages + kWalkSteps) {
    StepInfo::Store(p.products[lane - kMaxPages - 1], memory.step(lane - kMaxPages - 1));
  } else if (lane == kMaxPages) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      InitBarrier(memory.partials_full(buffer), 1);
      InitBarrier(memory.partials_free(buffer), 2);
    }
  }
  PublishBarriers();
}

// Records time and clock at a tick of the global timer, in the last two places of the CTA's stamps.
template <class I>
__device__ void Anchor(const Params& p, int number) {
  if constexpr (I::kStamps) {
    if (threadIdx.x != 0) return;
    const uint64_t before = Nanoseconds();
    uint64_t now;
    do now = Nanoseconds();
    while (now == before);
    Stamp<I>(p, p.layers * kWalkSteps + number, kStampStart, now);
    Stamp<I>(p, p.layers * kWalkSteps + number, kStampThere, Clock());
  }
}

template <class I>
__global__ void __launch_bounds__(I::kThreads, 1) WalkKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) uint8_t shared[];
  const Memory memory = {SharedAddress(shared)};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  LaunchDependents();
  if (warp == 0) InitBarriers(p, memory);
  Anchor<I>(p, 0);
  __syncthreads();
  ReleaseToCluster();
  WaitForArrivals();  // barriers of both CTAs exist
  if (warp < I::kConsumers) {
    if constexpr (I::kPassesRegisters) AcquireRegisters<I::kConsumerRegisters>();
    Consumer<I>(p, memory).MultiplyAll();
  } else {
    if constexpr (I::kPassesRegisters) ReleaseRegisters<I::kHelperRegisters>();
    if (warp == I::kConsumers) {
      PageFiller<I>(p, memory).FillAll();
    } else if (warp == I::kConsumers + 1) {
      Collector<I>(p, memory).CollectAll();
    }
  }
  __syncwarp();
  Anchor<I>(p, 1);
  __syncwarp();
  ReleaseToCluster();
  WaitForArrivals();  // the other CTA may still send
#endif
}

}  // namespace jaxlowbit::sm90_stream::walk
