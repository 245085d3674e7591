// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm80: out[b, i, n] = sum_k lhs[b, i, k] * w[k, n] of weight index[b], with
// w = round((q[k, n] - z[k / group_size, n]) * scale[k / group_size, n]), or with float zeros
// round(q * scale + zero), in 1 to 8 bits, bf16 or f16 lhs, float32 accumulation (with accumulate_float16, float16
// accumulation within a stage); compute capability 8.0 and up, every m.
//
// Bound. A 4-bit weight is half a byte and costs 2 m FLOP. At 200 FLOP per byte of memory traffic (H200, bf16) the
// product is a stream of packed weights up to m = 50: the ring below keeps loads in flight, and dequantization
// (2 instructions per weight, device/dequant.cuh) must hide under them.
//
// Decomposition. Weights are operand A of the instruction (16 output channels), rows of lhs operand B (8).
//
//               n ──►   kBlockN = 2 atoms
//             ┌─────────┬─────────┐   A CTA owns kBlockM rows x kBlockN channels of one of split_k
//        m    │  CTA 0  │  CTA 2  │   slices of k. Warp w owns channels 16 w .. 16 w + 15 of both atoms,
//        │    ├─────────┼─────────┤   so a weight is read and dequantized by exactly one warp.
//        ▼    │  CTA 1  │  CTA 3  │
//             └─────────┴─────────┘
//
// Storage. Quantized values are packed so that a lane's registers for an atom are consecutive words
// (device/layout.cuh): they go from global memory to fragments without being rearranged.
//
// Pipeline.   copy stage t + kStages - 1 ─┐                (fill.cuh, into the slot of stage t - 1)
//             wait for stage t ─► lhs fragments, packed weights ─► dequantize ─► mma      (multiply.cuh)
//
// With split_k > 1 a CTA stores float32 partial sums to the workspace, and ops/reduce_splits.cu adds them in a fixed
// order, so that results repeat bit for bit. The epilogue follows that reduction, or the last stage. In a gated
// product the two atoms of a CTA are a strip of the gate and the same strip of up.
//
// Ragged. The grid has one CTA for each tile of the worst case, since it does not depend on the sizes of the groups. CTAs
// without a tile exit early.
//
// Registers. Opaque (device/copy.cuh) keeps a thread's shared memory offsets in registers; otherwise the loop over
// stages would recompute them. ptxas for sm_80, bf16 by 4 bits, 64 rows: 155 registers, 166 without Opaque; 3 CTAs
// allow 168.
//
// Limits: select.cc. Rows of lhs that are not 16-byte aligned (k % 8 != 0) are copied element by element; everything
// else about k, m and n is handled by predicates.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm80/fill.cuh"
#include "cuda/kernels/sm80/multiply.cuh"
#include "cuda/kernels/sm80/params.cuh"

namespace jaxlowbit::sm80 {

// Stores accumulators of all of k through the epilogue. `shared`: the memory of the ring.
template <class I>
__device__ void StoreResults(const Params& p, const Tile& tile, uint8_t* shared,
                             const Accumulators<I>& acc) {
  const EpilogueParams& e = p.epilogue;
  const auto schedule = ScheduleOf<I>(p, tile);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = tile.block * kAtom + warp * 16 + lane / 4;  // of the first accumulator
  float4* own = reinterpret_cast<float4*>(shared) + threadIdx.x;
  // All warps have read the ring.
  __syncthreads();
#pragma unroll
  for (int atom = 0; atom < kAtomsN; ++atom) {
    const int64_t product = schedule.Position(tile.batch, atom);
    const int64_t n = e.gated ? column : column + atom * kAtom;
    const float low = LoadBias<typename I::T>(e, product, p.out_columns, n);
    const float high = LoadBias<typename I::T>(e, product, p.out_columns, n + 8);
    const float low_unit = LoadUnit(p.units, product, p.out_columns, n);
    const float high_unit = LoadUnit(p.units, product, p.out_columns, n + 8);
#pragma unroll
    for (int mma = 0; mma < I::kTiles; ++mma) {
      const float (&sum)[4] = acc[atom][mma];
      own[(atom * I::kTiles + mma) * kThreads] =
          make_float4(fmaf(sum[0], low_unit, low), fmaf(sum[1], low_unit, low),
                      fmaf(sum[2], high_unit, high), fmaf(sum[3], high_unit, high));
    }
  }
#pragma unroll 1
  for (int i = 0; i < (e.gated ? I::kTiles : kAtomsN * I::kTiles); ++i) {
    const int atom = i / I::kTiles, mma = i % I::kTiles;
    const int64_t m0 = tile.m0 + mma * 8 + lane % 4 * 2, n0 = column + atom * kAtom;
    float residual[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t m = m0 + j % 2, n = n0 + j / 2 * 8;
      const bool exists = m < schedule.Rows(tile.batch) && n < p.out_columns;
      residual[j] =
          exists ? LoadResidual<typename I::T>(e, schedule.Row(tile.batch, m) * p.out_columns + n)
                 : 0.0f;
    }
    const float4 first = own[i * kThreads];
    const float4 second = e.gated ? own[(I::kTiles + i) * kThreads] : first;
    float values[4] = {first.x, first.y, first.z, first.w};
    const float up[4] = {second.x, second.y, second.z, second.w};
    Finish(e, up, residual, values);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      StoreOut<I>(p, tile, m0 + j % 2, n0 + j / 2 * 8, values[j]);
    }
  }
}

// Stores zeros in all columns of rows without a weight.
template <class I>
__device__ void StoreZeros(const Params& p, const Tile& tile) {
  const auto schedule = ScheduleOf<I>(p, tile);
  for (int row = 0; row < schedule.Rows(0); ++row) {
    for (int64_t column = threadIdx.x; column < p.out_columns; column += kThreads) {
      StoreOut<I>(p, tile, row, column, 0);
    }
  }
}

// Finds the tile of a CTA among the groups, whose table is in shared memory before the ring is. Returns whether it is a
// product; rows without a weight become zeros.
template <class I>
__device__ bool FindRaggedTile(const Params& p, uint32_t shared, Tile* tile) {
  const RaggedTable groups(shared);
  if (threadIdx.x < 32) groups.Store(p.ragged);
  __syncthreads();
  const int number = static_cast<int>(blockIdx.x);
  if (number >= groups.NumTiles(p.ragged)) return false;
  RaggedTile rows = groups.Find(p.ragged, number);
  // The ring overwrites the table.
  __syncthreads();
  rows.end = min(rows.end, rows.first + p.ragged.block);
  *tile = {};
  tile->rows = rows;
  tile->block = rows.column * (p.epilogue.gated ? 1 : kAtomsN);
  if (rows.expert < 0) {
    StoreZeros<I>(p, *tile);
    return false;
  }
  CompleteTile<I>(p, tile);
  return true;
}

template <class I>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(I::kBlockM, I::kAccumulatorBytes))
    QmmSm80Kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t ring[];  // [kStages][slot_bytes]
  Tile tile;
  if constexpr (I::kRagged) {
    if (!FindRaggedTile<I>(p, SharedAddress(ring), &tile)) return;
  } else {
    tile = OwnTile<I>(p, p.epilogue.gated ? 1 : kAtomsN);
  }
  StageCopier<I> copier(p, tile);
  StageMultiplier<I> multiplier(p, tile);
  Accumulators<I> acc = {};
  RunStages<I>(p, tile, Opaque(SharedAddress(ring)), copier, multiplier, acc);
  multiplier.Finish(acc);
  LaunchDependents();
  if (p.epilogue.any && p.split_k == 1) {
    StoreResults<I>(p, tile, ring, acc);
    return;
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
    for (int mma = 0; mma < I::kTiles; ++mma) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t m = tile.m0 + mma * 8 + lane % 4 * 2 + i % 2;
        const int64_t n =
            (tile.block + atom * p.atom_step) * kAtom + warp * 16 + i / 2 * 8 + lane / 4;
        StoreOut<I>(p, tile, m, n, acc[atom][mma][i]);
      }
    }
  }
}

}  // namespace jaxlowbit::sm80
