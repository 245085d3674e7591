// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm90_stream: the product of qmm_sm80 for small m (up to 32) on Hopper. It streams packed weights from memory and
// overlaps everything else with the stream.
//
// Bound: memory bandwidth. 8192 x 8192 in 4 bits are 34.6 MB: 8.0 us at 4.3 TB/s, 260 KB for each of 132
// multiprocessors; shared memory fits half of that. So copies must start at once and never pause, and little work may
// remain when the last one has arrived.
//
// Decomposition. Weights are operand A of the instruction: a slice is 16 output channels. A cluster of 1, 2 or 4 CTAs
// owns neighbouring slices, each CTA a part of k; drawn for 4.
//
//               k ──►  rank 0   rank 1   rank 2   rank 3
//             ┌────────┬────────┬────────┬────────┐   A CTA works through its slices in tiles of up
//        n    │        │        │        │        │   to 16, and through its k in stages. 8 consumer
//        │    │ CTA 0  │ CTA 1  │ CTA 2  │ CTA 3  │   warps take 2 slices each; if a tile has
//        ▼    │        │        │        │        │   fewer, they divide the stage's atoms of k.
//             └────────┴────────┴────────┴────────┘
//
// Pipeline.   warp 8, the producer: wait for a free slot ─► TMA of packed weights, lhs, scales     (fill.cuh)
//             warps 0-7, consumers: wait for a full slot ─► dequantize ─► mma ─► free it       (multiply.cuh)
//             before the first tile, if lhs is permuted or to be rounded: all of the CTA's lhs (gather.cuh, round.cuh)
//             end of a tile: send partial sums to their owners ─► add in order ─► epilogue ─► store
//                                                                                                (reduce.cuh)
//
// Ragged. CTAs are persistent (device/schedule/ragged.cuh): the ring goes on from one tile to the next, two producers
// take turns, and a tile is reduced when the warp has multiplied the next one.
//
// Listed. A dense batch of single rows (device/schedule/listed.cuh): the producer finds the expert of its row first,
// and the CTA stores zeros or leaves if there is none.
//
// Gated. Strips of the gate and of up alternate, and a warp's two slices are the same channels of both.
//
// Storage. Quantized values are in the order of the fragments (device/layout.cuh): a lane's registers for a slice and
// an atom are 16 or 32 consecutive bytes.
//
// Registers. Two CTAs on a multiprocessor leave 112 to a thread; bf16 by 4 bits takes 96 at 8 rows.
//   Opaque, before a loop          keeps offsets and sizes in registers instead of recomputing them in every stage.
//   Opaque, on threadIdx or ranks  recomputes an offset after the loop, so that it needs no register in the loop.
// Params (params.cuh) are read from the constant cache, so their order matters: add new members at the end.
//
// Limits: select.cc.
#pragma once

#include "cuda/kernels/sm90_stream/fill.cuh"
#include "cuda/kernels/sm90_stream/gather.cuh"
#include "cuda/kernels/sm90_stream/multiply.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"
#include "cuda/kernels/sm90_stream/reduce.cuh"
#include "cuda/kernels/sm90_stream/round.cuh"

namespace jaxlowbit::sm90_stream {

// Called by one warp. (Compiled for other architectures, the kernel is empty.)
template <class I>
__device__ void InitBarriers(const Plan& plan, Memory memory) {
  const int lane = threadIdx.x % 32;
  if (lane < plan.num_stages) {
    InitBarrier(memory.full(lane), 1);
    InitBarrier(memory.empty(lane), kWarps * kWarpArrivals);
  } else if (lane == kMaxStages) {
    for (int buffer = 0; buffer < (I::kRagged ? 2 : 1); ++buffer) {
      InitBarrier(memory.partials_full(buffer), 1);
      InitBarrier(memory.partials_free(buffer), (I::kRagged ? kWarps : 1) << plan.cluster_shift);
    }
    if constexpr (I::kLhsPath == LhsPath::kRounds) InitBarrier(memory.largest_full(), 1);
  }
  PublishBarriers();
}

// A warp's work: two slices of a tile, from `slice` on, and one part of a stage's atoms.
struct Place {
  int slice, part;
};

__device__ inline Place OwnPlace(const Params& p) {
  const int warp = Opaque(threadIdx.x) / 32;
  const int part = p.pairs.Divide(warp);
  const int pairs = (p.plan.tile_slices + kSlicesPerWarp - 1) / kSlicesPerWarp;
  return {(warp - part * pairs) * kSlicesPerWarp, part};
}

// A consumer warp's multiplier, and its place in the ring.
template <class I>
struct Consumer {
  const Params& p;
  const Memory memory;
  const int stage_atoms, num_stages, slot_bytes;
  const uint32_t ring;
  const int lane;
  StageMultiplier<I> multiplier;
  RingCursor cursor;

  __device__ Consumer(const Params& p, Memory memory)
      : p(p),
        memory(memory),
        stage_atoms(Opaque(p.plan.stage_atoms)),
        num_stages(Opaque(p.plan.num_stages)),
        slot_bytes(Opaque(p.plan.slot_bytes)),
        ring(Opaque(memory.stage(p.plan, 0))),
        lane(Opaque(threadIdx.x % 32)),
        multiplier(p, OwnPlace(p).part, lane),
        cursor{0, 0} {}

  // Ragged: waits for the first stage of tile `number`, and returns its share.
  __device__ Share NextShare(int number) const {
    Wait(memory.full(cursor.slot), cursor.parity);
    return RaggedShareOf(p, memory.LoadTile(number));
  }

  // The destinations of this warp's partial sums of a tile of `slices` slices.
  struct Sending {
    typename ClusterReducer<I>::Destination of[kSlicesPerWarp];
    int count;  // of slices

    // Keeps the values in registers.
    __device__ void Pin() {
      count = Opaque(count);
#pragma unroll
      for (auto& to : of) to = {Opaque(to.fragment), Opaque(to.barrier)};
    }
  };
  __device__ Sending SendingOf(const ClusterReducer<I>& reducer, int slices) const {
    const Place own = OwnPlace(p);
    Sending sending;
    sending.count = own.part < p.plan.warps_k ? slices - own.slice : 0;
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      sending.of[i] = reducer.DestinationOf(own.slice + i, own.part);
    }
    return sending;
  }

  // Multiplies a tile, and sends partial sums to their owners. `gathered_end`: of activations that are not in stages.
  __device__ void MultiplyAndSend(const Share& share, int tile, int slices,
                                  const ClusterReducer<I>& reducer, uint32_t gathered_end) {
    const Place own = OwnPlace(p);
    const bool active = own.slice < slices && own.part < p.plan.warps_k;
    if (threadIdx.x == 0) reducer.Expect(slices);
    multiplier.StartTile(tile, own.slice, slices);
    // After the loop, each instruction delays the next kernel; with more rows there are no registers left.
    constexpr bool kEarly = I::kTiles == 1;
    Sending sending = {};
    if constexpr (kEarly) {
      sending = SendingOf(reducer, slices);
      sending.Pin();
    }
    Accumulators<I> acc = {};
    for (int left = share.atom_end - share.atom_begin; left > 0; left -= stage_atoms) {
      Wait(memory.full(cursor.slot), cursor.parity);
      const uint32_t stage = ring + cursor.slot * slot_bytes;
      const uint32_t activations =
          I::kLhsPath == LhsPath::kStages ? stage : gathered_end - left * multiplier.LhsBytes();
      if (active) multiplier.Multiply(stage, activations, left, acc);
      ArriveAsWarp(memory.empty(cursor.slot), lane);  // every lane has read the stage
      cursor.Advance(num_stages);
    }
    if constexpr (I::kHasOneRow) {
      if (p.m == 1) StageMultiplier<I>::SumColumns(acc);
    }
    reducer.WaitUntilFree();
    if constexpr (!kEarly) sending = SendingOf(reducer, slices);
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      if (i < sending.count) reducer.Send(sending.of[i], acc[i]);
    }
  }
};

// Multiplies the tiles of a share.
template <class I>
__device__ void Consume(const Params& p, const Share& share, Memory memory) {
  Consumer<I> consumer(p, memory);
  uint32_t gathered_end = 0;
  if constexpr (I::kLhsPath == LhsPath::kGathers) GatherLhs(p, share, memory);
  if constexpr (I::kLhsPath != LhsPath::kStages) {
    const int atoms = share.atom_end - share.atom_begin;
    gathered_end = Opaque(memory.base + p.plan.gathered + atoms * consumer.multiplier.LhsBytes());
  }
  if constexpr (I::kLhsPath != LhsPath::kRounds) WaitForArrivals();  // all CTAs have barriers
  int number = 0;
  for (int tile = share.slice_begin; tile < share.slice_end; tile += p.plan.tile_slices) {
    const int slices = min(p.plan.tile_slices, share.slice_end - tile);
    const ClusterReducer<I> reducer(p, share, memory, number);
    consumer.MultiplyAndSend(share, tile, slices, reducer, gathered_end);
    reducer.Collect(tile, slices);
    if (tile + p.plan.tile_slices < share.slice_end) reducer.Free();
    ++number;
  }
}

// Loads every second tile of the CTA, from its tile `turn` on; another producer loads the others. So one finds its next
// tile, which takes 4,000 cycles, while the other loads.
template <class I>
__device__ void FillRagged(const Params& p, Memory memory, const RaggedTable& groups, int turn,
                           int first, int clusters, int num_products) {
  constexpr int kBarrier = 2,
                kBoth = 2 * 32;  // named barriers: the other producer has loaded a tile
  RingCursor cursor = {0, 1};
  int tile = turn, number = first + turn * clusters;
  for (; number < num_products; number += 2 * clusters, tile += 2) {
    const Share share = RaggedShareOf(p, groups.Find(p.ragged, number));
    const StageFiller<I> filler(p, share, memory);
    if (tile > 0) {
      cursor.Advance(share.stages, p.plan.num_stages);
      Synchronize(kBarrier + turn, kBoth);
    }
    if (threadIdx.x % 32 == 0) memory.StoreTile(tile, share.tile);
    for (int stage = 0; stage < share.stages; ++stage) filler.FillStage(stage, cursor);
    if (number + clusters < num_products) ArriveForOthers(kBarrier + 1 - turn, kBoth);
  }
}

// Reduces and stores a tile, after all of it has been multiplied. `more`: whether other tiles will use its buffer.
template <class I>
__device__ void CollectRagged(const Params& p, Memory memory, int number, bool more) {
  const Share share = RaggedShareOf(p, memory.LoadTile(number));
  const ClusterReducer<I> reducer(p, share, memory, number);
  const int tile = share.slice_begin, slices = share.slice_end - share.slice_begin;
  reducer.Collect(tile, slices);
  if (more) reducer.Free();
}

// Stores zeros in the columns [begin, end) of a row, by the consumers of one CTA of the cluster.
template <class I>
__device__ void StoreZeros(const Params& p, int row, int begin, int end) {
  if (ClusterRank() > 0) return;
  const Product& part = p.products[0];
  const int64_t offset = int64_t{row} * part.n;
  for (int n = begin + static_cast<int>(threadIdx.x); n < end; n += kConsumerThreads) {
    if (p.out_float) {
      static_cast<float*>(part.out)[offset + n] = 0.0f;
    } else {
      static_cast<typename I::T*>(part.out)[offset + n] = typename I::T(0.0f);
    }
  }
}

// A RaggedInstance: persistent CTAs, whose producers load weights of the next tile while consumers end one.
template <class I>
__device__ void MultiplyRagged(const Params& p, Memory memory) {
  const int warp = threadIdx.x / 32;
  const RaggedTable groups = memory.groups(p.plan);
  if (warp == 0) InitBarriers<I>(p.plan, memory);
  if (warp == kWarps) {
    WaitForPreviousKernels();  // they may have written the sizes
    groups.Store(p.ragged);
  }
  __syncthreads();  // barriers and the table exist
  ArriveAtCluster();
  LaunchDependents();
  const int first = static_cast<int>(blockIdx.x) >> p.plan.cluster_shift;
  const int clusters = static_cast<int>(gridDim.x) >> p.plan.cluster_shift;
  const int num_products = groups.NumProducts(p.ragged);
  if (warp >= kWarps) {
    FillRagged<I>(p, memory, groups, warp - kWarps, first, clusters, num_products);
    WaitForArrivals();
    return;
  }
  Consumer<I> consumer(p, memory);
  int tiles = 0, number = first;
  for (; number < num_products; number += clusters, ++tiles) {
    {
      const Share share = consumer.NextShare(tiles);
      const ClusterReducer<I> reducer(p, share, memory, tiles);
      consumer.MultiplyAndSend(share, share.slice_begin, share.slice_end - share.slice_begin,
                               reducer, 0);
    }
    if (tiles == 0) continue;
    CollectRagged<I>(p, memory, tiles - 1, number + clusters < num_products);
  }
  if (tiles > 0) CollectRagged<I>(p, memory, tiles - 1, false);
  if (tiles == 0) WaitForArrivals();
  const int num_tiles = groups.NumTiles(p.ragged);
  for (; number < num_tiles; number += clusters) {
    const RaggedTile tile = groups.Find(p.ragged, number);
    for (int row = tile.first; row < tile.end; ++row) StoreZeros<I>(p, row, 0, p.products[0].n);
  }
}

// Finds the expert of a ListedInstance's row. Returns whether there is one, the same for all CTAs of a cluster. Called
// by all threads.
__device__ inline bool FindExpert(const Params& p, Memory memory) {
  if (threadIdx.x >= kConsumerThreads) {
    if (p.listed.waits) WaitForPreviousKernels();
    const int expert = ExpertOf(p.listed, static_cast<int>(blockIdx.y));
    if (threadIdx.x == kConsumerThreads) memory.StoreExpert(expert);
    if (expert < 0) WaitForPreviousKernels();  // so that kernels end in launch order
  }
  __syncthreads();
  return memory.LoadExpert() >= 0;
}

// Stores zeros in this CTA's columns of a row that has no expert, if the product has sizes: the rows of a list are left
// as they are.
template <class I>
__device__ void StoreZerosBySizes(const Params& p) {
  if (p.listed.groups == 0 || threadIdx.x >= kConsumerThreads) return;
  WaitForPreviousKernels();  // they may read the result's memory
  const Share share = OwnShare(p);
  const int channels = kSliceRows / (p.epilogue.gated ? 2 : 1);
  StoreZeros<I>(p, share.batch, share.slice_begin * channels,
                min(p.products[0].n, share.slice_end * channels));
}

template <class I>
__global__ void __launch_bounds__(ThreadsOf(I::kRagged), I::kCtasPerSm)
    QmmSm90StreamKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(kTmaAlignment) uint8_t shared[];
  const Memory memory = {Opaque(SharedAddress(shared))};
  if constexpr (I::kRagged) return MultiplyRagged<I>(p, memory);
  if constexpr (I::kListed) {
    if (!FindExpert(p, memory)) return StoreZerosBySizes<I>(p);
  }
  const int warp = threadIdx.x / 32;
  const auto synchronize = [&] {
    __syncthreads();  // barriers exist
    ArriveAtCluster();
    if (!I::kStartsNextLate && (!I::kDivided || !p.holds_next)) LaunchDependents();
  };
  if constexpr (kForSanitizer) {  // all threads at one instruction
    if (warp == 0) InitBarriers<I>(p.plan, memory);
    synchronize();
  }
  if (warp == kWarps) {
    const Share share = OwnShare<I>(p, memory);
    StageFiller<I> filler(p, share, memory);  // computes addresses while barriers are initialized
    if constexpr (!kForSanitizer) synchronize();
    filler.FillAll();
    WaitForArrivals();
  } else {
    const auto start = [&] {
      if constexpr (!kForSanitizer) {
        if (warp == 0) InitBarriers<I>(p.plan, memory);
        synchronize();
      }
    };
    if constexpr (I::kLhsPath == LhsPath::kRounds) {
      const Share share = OwnShare<I>(p, memory);
      RowRounder rounder(p, share, memory);
      start();
      rounder.Round(share.rank);
    } else {
      start();
    }
    Consume<I>(p, OwnShare<I>(p, memory), memory);
  }
#endif
}

}  // namespace jaxlowbit::sm90_stream
