// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm80_transposed: out[b, i, k] = sum_n lhs[b, i, n] * w[k, n] of weight index[b], from the same packed words as
// qmm_sm80: the cotangent of lhs. Formats, types and rounding are as in qmm_sm80.
//
// Decomposition. A CTA owns kBlockM rows x one atom of 64 k of one of split_k slices of n. A stage is one or two
// neighbouring atoms along n. Warp w owns channels 16 w .. 16 w + 15 of each atom, which are contiguous in packed order, so the
// four warps accumulate over different n and add their partial sums at the end, in shared memory.
//
// Transposition. Dequantized registers are 8 x 8 blocks with n along the lanes; the instruction requires k there.
// movmatrix transposes a block in one instruction, and operand A of the transposed weights is the four transposed
// blocks with the middle two exchanged.
//
// Pipeline. RunStages of qmm_sm80, with n in the place of k.
//
// Registers. Opaque as in qmm_sm80: 216 registers at 64 rows; 231 without it.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm80_transposed/fill.cuh"
#include "cuda/kernels/sm80_transposed/multiply.cuh"

namespace jaxlowbit::sm80 {

template <class I>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(I::kBlockM, 8))
    QmmSm80TransposedKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t ring[];  // [kStages][slot_bytes]
  const Tile tile = OwnTile<I>(p, 1);
  TransposedCopier<I> copier(p, tile);
  TransposedMultiplier<I> multiplier(p, tile);
  TransposedAccumulators<I> acc = {};
  RunStages<I>(p, tile, Opaque(SharedAddress(ring)), copier, multiplier, acc);
  LaunchDependents();

  // [warp][step][tile][register][lane]: neighbours in a row, no bank conflicts.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* partial = reinterpret_cast<float*>(ring);
  const auto at = [&](int from, int step, int mma, int i) -> float& {
    return partial[(((from * kStepsPerAtom + step) * I::kTiles + mma) * 4 + i) * 32 + lane];
  };
  // All warps have read the ring.
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
    for (int mma = 0; mma < I::kTiles; ++mma) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at(warp, step, mma, i) = acc[step][mma][i];
    }
  }
  // The partial sums of all warps are in shared memory; warp w adds step w.
  __syncthreads();
  for (int mma = 0; mma < I::kTiles; ++mma) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = at(0, warp, mma, i);
#pragma unroll
      for (int from = 1; from < kWarpsPerAtom; ++from) sum += at(from, warp, mma, i);
      const int64_t m = tile.m0 + mma * 8 + lane % 4 * 2 + i % 2;
      const int64_t k = tile.block * kAtom + warp * kStepK + i / 2 * 8 + lane / 4;
      StoreOut<I>(p, tile, m, k, sum);
    }
  }
}

}  // namespace jaxlowbit::sm80
