// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm90: the product of qmm_sm80 for larger m on Hopper, by wgmma with weights from registers.
//
// Bound: tensor cores, from about 50 rows on. A wgmma must always be in flight while other warps, or the same warps for
// their next wgmma, dequantize and load.
//
// Decomposition. Weights are operand A of the instruction: a strip is its 64 output channels. A persistent CTA
// computes tiles of some strips x rows (kTiles in plan.h), one after the other:
//
//                  rows ──►                       1 to 3 consumer warpgroups, each with separate strips
//             ┌──────────┐                        and all rows; one thread of one more is the producer.
//   channels  │ strip 0  │ warpgroup 0            Stream-K: the tiles that are left when every CTA has had
//      │      ├──────────┤                        the same number are split along k, so that all CTAs
//      ▼      │ strip 1  │ warpgroup 1            have a part of them.
//             └──────────┘
//
// Pipeline.   producer:  wait for a free slot ─► TMA of packed weights, lhs, scales      (fill.cuh)
//             consumers: wait for a full slot ─► dequantize ─► wgmma ─► free it          (multiply.cuh)
//             end of a tile: epilogue ─► store                                           (store.cuh)
//             end of a part of the tail: partial sums to the workspace, for a kernel that adds them (reduce.cuh)
//
// Ragged. A tile's rows belong to one group, which the CTA finds in a table that it makes first
// (device/schedule/ragged.cuh). Tiles are not split along k.
//
// Gated. Strips of a CTA are in pairs: the same channels of the gate and of up. Tiles with an odd number of strips do
// not support gated products.
//
// Storage. Quantized values are in the order of the mma.sync fragments (device/layout.cuh): warp w of the warpgroup
// owns channels 16 w to 16 w + 15 of a strip.
//
// Registers. Consumers use nearly all registers for accumulators, two units of weights, and scales.
//   Opaque, before a loop    keeps an offset or a count in a register instead of recomputing it in every stage.
//   Opaque, on threadIdx     recomputes an index after the loop, so that it needs no register while wgmma run.
//   FenceRegisters           tells the compiler that wgmma in flight use these registers (device/wgmma.cuh).
//   __shfl_sync(.., 0)       makes a descriptor uniform: wgmma reads it from a uniform register.
// Epilogues run in loops that are not unrolled, through shared memory (Form::kOther), or are compiled for each Form.
//
// Limits: select.cc.
#pragma once

#include "cuda/kernels/sm90/fill.cuh"
#include "cuda/kernels/sm90/multiply.cuh"
#include "cuda/kernels/sm90/multiply_bytes.cuh"
#include "cuda/kernels/sm90/params.cuh"
#include "cuda/kernels/sm90/reduce.cuh"
#include "cuda/kernels/sm90/store.cuh"

namespace jaxlowbit::sm90 {

// Called by one warp. (Compiled for other architectures, the kernel is empty.)
template <class I>
__device__ void InitBarriers(const Plan& plan, int peer_shift, Memory memory) {
  const int lane = threadIdx.x % 32;
  if (lane < plan.num_stages) {
    InitBarrier(memory.full(lane), 1);
    InitBarrier(memory.empty(lane), I::kWarps * kWarpArrivals << peer_shift);
  } else if (lane == kMaxStages) {
    for (int i = 0; i < kResultBuffers * I::kTile.warpgroups; ++i) {
      InitBarrier(memory.residual_full(0, i), 1);
    }
    InitBarrier(memory.up_empty(), 4 * kWarpArrivals);
    if (kForSanitizer) InitBarrier(memory.exchange(), 256);
  }
  PublishBarriers();
}

// The next task of the consumers. Ragged: the producer has found it before it loaded the first stage.
template <class I>
__device__ Task NextTask(const Params& p, Memory memory, int number, int rank, int tasks,
                         const RingCursor& cursor) {
  if constexpr (I::kRagged) {
    Wait(memory.full(cursor.slot), cursor.parity);
    return WholeTile(p, memory.LoadTile(tasks));
  } else {
    return TaskOf<I>(p, memory, number, rank);
  }
}

// The tasks of a CTA: `first`, `first` + `step` and so on, below `end`. `rank`: among the peers.
struct Tasks {
  int rank, first, step, end;
};

// The producer's warpgroup: one thread loads, and a warp for each warpgroup of consumers reads scales.
template <class I>
__device__ void Produce(const Params& p, Memory memory, const Tasks& own, int warp) {
  // Starts before the consumers have arrived, unless peers load to their shared memory.
  if (p.peer_shift > 0) {
    WaitForArrivals();
  } else if (!I::kRagged && warp == I::kWarps) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < I::kTile.warpgroups; ++i)
      ArriveForOthers(kStartBarrier + i, kWarpgroupAndWarp);
  }
  if (warp == I::kWarps && IsElected()) {
    const StageFiller<I> filler(p, own.rank, memory);
    RingCursor cursor = {0, 0};
    int ahead = p.ahead_stages > 0 && own.first < own.end
                    ? filler.LoadAhead(TaskOf<I>(p, memory, own.first, own.rank))
                    : 0;
    WaitForPreviousKernels();
    int tasks = 0;
    for (int number = own.first; number < own.end; number += own.step, ++tasks) {
      const Task task = TaskOf<I>(p, memory, number, own.rank);
      if constexpr (I::kRagged) {
        memory.StoreTile(tasks, task.tile);
        filler.PrefetchScales(task.tile);
      }
      filler.Fill(task, ahead, cursor);
      ahead = 0;
    }
  } else if (const int warpgroup = warp - I::kWarps - 1;
             warpgroup >= 0 && warpgroup < I::kTile.warpgroups && DependsOnScales<I>(p)) {
    for (int number = own.first + own.step; number < own.end; number += own.step) {
      CheckScales<I>(p, TaskOf<I>(p, memory, number, own.rank), warpgroup);
    }
  }
  __syncwarp();
}

// The consumers: products and results.
template <class I>
__device__ void Consume(const Params& p, Memory memory, const Tasks& own) {
  using Multiplier = std::conditional_t<I::k8BitLhs, ByteMultiplier<I>, TileMultiplier<I>>;
  const Multiplier multiplier(p, memory);
  TileStorer<I> storer(p, memory);
  RingCursor cursor = {0, 0};
  int number = own.first, tasks = 0;
  Task task;
  bool fits = true;
  if (!I::kRagged && number < own.end) {
    task = TaskOf<I>(p, memory, number, own.rank);
    fits = ScalesFit<I>(p, task);
  }
  if (p.peer_shift > 0) {
    WaitForArrivals();
  } else if (!I::kRagged) {
    Synchronize(kStartBarrier + static_cast<int>(threadIdx.x) / 128, kWarpgroupAndWarp);
  }
  WaitForPreviousKernels();
  Accumulators<I> acc;
  Factors<I> factors;
  for (; number < own.end; number += own.step, ++tasks) {
    if (I::kRagged || tasks > 0) {
      task = NextTask<I>(p, memory, number, own.rank, tasks, cursor);
    }
    if (tasks > 0) {
      fits = CheckedScalesFit<I>(p);
    } else if (I::kRagged) {
      fits = ScalesFit<I>(p, task);
    }
    if (task.partial < 0) storer.Begin(task.tile);
    multiplier.Multiply(task, fits, acc, factors, cursor);
    if (task.partial < 0) {
      storer.Store(task.tile, acc, factors);
    } else {
      StorePartial<I>(p, task.partial, acc, factors);
    }
  }
  if constexpr (I::kRagged) {
    for (; number < memory.groups(p.plan).NumTiles(p.ragged); number += own.step) {
      storer.StoreZeros(TaskOf<I>(p, memory, number, own.rank).tile);
    }
  }
  storer.Finish();
}

template <class I>
__global__ void __launch_bounds__(I::kThreads, I::kTile.ctas_per_sm)
    QmmSm90Kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(kTmaAlignment) uint8_t shared[];
  const Memory memory = {Opaque(SharedAddress(shared))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if constexpr (I::kReallocatesRegisters) {
    if (warp >= I::kWarps) ReleaseRegisters<I::kCopyRegisters>();
  }
  if (warp == I::kWarps) InitBarriers<I>(p.plan, p.peer_shift, memory);
  const bool clustered = p.peer_shift > 0;
  if (clustered) ArriveAtCluster();
  if constexpr (I::kRagged) {
    if (warp == 0) {
      WaitForPreviousKernels();  // they may have written the sizes
      memory.groups(p.plan).Store(p.ragged);
    }
    __syncthreads();
  }
  LaunchDependents();
  const Tasks own = {clustered ? ClusterRank() : 0, static_cast<int>(blockIdx.x >> p.peer_shift),
                     static_cast<int>(gridDim.x >> p.peer_shift), NumTasks<I>(p, memory)};
  if (warp >= I::kWarps) {
    Produce<I>(p, memory, own, warp);
  } else {
    if constexpr (I::kReallocatesRegisters) AcquireRegisters<I::kMultiplyRegisters>();
    Consume<I>(p, memory, own);
  }
  if (clustered) {  // peers must not exit while others may still signal their barriers
    ReleaseToCluster();
    WaitForArrivals();
  }
#endif
}

}  // namespace jaxlowbit::sm90
