// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm80: out[b, i, n] = sum_k lhs[b, i, k] * w[k, n] of weight index[b], with
// w = round((q[k, n] - z[k / group_size, n]) * scale[k / group_size, n]) in 4 or 8 bits, bf16 or f16
// lhs, float32 accumulation; compute capability 8.0 and up, every m.
//
// Bound. A 4-bit weight is half a byte and costs 2 m FLOP. At 200 FLOP per byte of memory traffic
// (H200, bf16) the product is a stream of codes up to m = 50: the ring below keeps loads in flight,
// and dequantization (2 instructions per weight, device/dequant.cuh) must hide under them.
//
// Decomposition. Weights are operand A of the instruction (16 output channels), tokens operand B (8).
//
//               n ──►   kBlockN = 2 atoms
//             ┌─────────┬─────────┐   A CTA owns kBlockM tokens x kBlockN channels of one of split_k
//        m    │  CTA 0  │  CTA 2  │   ranges of k. Warp w owns rows 16 w .. 16 w + 15 of both atoms,
//        │    ├─────────┼─────────┤   so a weight is read and dequantized by exactly one warp.
//        ▼    │  CTA 1  │  CTA 3  │
//             └─────────┴─────────┘
//
// Storage. Codes are packed so that a lane's registers for an atom are consecutive words
// (device/layout.cuh): they go from global memory to fragments without being rearranged.
//
// Pipeline.   copy stage t + kStages - 1 ─┐         (qmm_sm80/copy.cuh, into the slot of stage t - 1)
//             wait for stage t ─► lhs fragments, codes ─► dequantize ─► mma  (qmm_sm80/multiply.cuh)
//
// With split_k > 1 a CTA leaves float32 partial sums in the workspace and reduce_splits.cu adds them
// in a fixed order, so that results are the same bits every time.
//
// Limits: Unsupported() in dispatch.cc. Rows of lhs that are not 16-byte aligned (k % 8 != 0) are
// copied element by element; everything else about k, m and n is handled by predicates.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

#include "cuda/device/dependency.cuh"
#include "cuda/kernels.h"
#include "cuda/qmm_sm80/copy.cuh"
#include "cuda/qmm_sm80/multiply.cuh"
#include "cuda/qmm_sm80/params.cuh"

namespace jaxlowbit {
namespace qmm_sm80 {
namespace {

// Writes the sums of one atom along n to out, or, when k is split, to this split's part of the
// workspace.
template <class I>
__device__ void StoreAtom(const Params& p, const Tile& tile, int atom,
                          const float (&sums)[I::kTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarpsPerAtom;
  const bool partial = p.split_k > 1;
  // Rows of the workspace are padded to whole atoms, and its splits follow each other.
  const int64_t row_size = partial ? p.n_blocks * kAtom : p.n;
  const int64_t split_offset = tile.split * p.batch * p.m * row_size;
#pragma unroll
  for (int mma = 0; mma < I::kTiles; ++mma) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t m = tile.m0 + mma * 8 + lane % 4 * 2 + i % 2;
      const int64_t n = (tile.n_block + atom) * kAtom + warp * 16 + i / 2 * 8 + lane / 4;
      if (m >= p.m || n >= row_size) continue;
      const int64_t offset = split_offset + (tile.batch * p.m + m) * row_size + n;
      if (partial || p.out_float) {
        static_cast<float*>(p.out)[offset] = sums[mma][i];
      } else {
        static_cast<typename I::T*>(p.out)[offset] = typename I::T(sums[mma][i]);
      }
    }
  }
}

template <class I>
__global__ void __launch_bounds__(kThreads, I::kMinCtas)
    QmmSm80Kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t ring[];  // [kStages][slot_bytes]
  const Tile tile = OwnTile<I>(p);
  const uint32_t first_slot = Keep(SharedAddress(ring));
  const uint32_t end = first_slot + I::kStages * p.slot_bytes;
  StageCopier<I> copier(p, tile);
  StageMultiplier<I> multiplier(p, tile);

  uint32_t free_slot = first_slot;
#pragma unroll
  for (int i = 0; i < I::kStages - 1; ++i) {
    if (tile.stage_begin + i < tile.stage_end) copier.CopyNext(free_slot);
    CommitCopies();
    free_slot += p.slot_bytes;
  }

  Sums<I> sums = {};
  uint32_t slot = first_slot;
  for (int stage = tile.stage_begin; stage < tile.stage_end; ++stage) {
    WaitCopies<I::kStages - 2>();
    // Every thread's part of this stage has landed, and all warps are done with the slot before
    // it, which the next copy overwrites.
    __syncthreads();
    if (stage + I::kStages - 1 < tile.stage_end) copier.CopyNext(free_slot);
    CommitCopies();
    free_slot = slot;
    multiplier.MultiplyNext(slot, sums);
    slot += p.slot_bytes;
    if (slot == end) slot = first_slot;
  }
  LaunchDependents();
#pragma unroll
  for (int atom = 0; atom < kAtomsN; ++atom) StoreAtom<I>(p, tile, atom, sums[atom]);
}

using Kernel = void (*)(Params);

// The table of instances: every tile of tokens for a type of lhs, a type of scales and a width.
template <typename T, typename S, int kBits>
Kernel Find(int block_m) {
  switch (block_m) {
    case 8:
      return QmmSm80Kernel<Instance<T, S, 8, kBits>>;
    case 16:
      return QmmSm80Kernel<Instance<T, S, 16, kBits>>;
    case 32:
      return QmmSm80Kernel<Instance<T, S, 32, kBits>>;
    case 64:
      return QmmSm80Kernel<Instance<T, S, 64, kBits>>;
  }
  return nullptr;
}

template <typename T>
Kernel Find(ElementType scale, int bits, int block_m) {
  if (scale == ElementType::kF32) {
    return bits == 4 ? Find<T, float, 4>(block_m) : Find<T, float, 8>(block_m);
  }
  return bits == 4 ? Find<T, T, 4>(block_m) : Find<T, T, 8>(block_m);
}

Kernel Find(ElementType lhs, ElementType scale, int bits, int block_m) {
  return lhs == ElementType::kBf16 ? Find<__nv_bfloat16>(scale, bits, block_m)
                                   : Find<__half>(scale, bits, block_m);
}

Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice) {
  Params p;
  p.lhs = buffers.lhs;
  p.packed = buffers.packed;
  p.scale = buffers.scale;
  p.zero = static_cast<const uint8_t*>(buffers.zero);
  p.index = buffers.index;
  p.out = choice.split_k > 1 ? buffers.workspace : buffers.out;
  p.batch = problem.batch;
  p.num_weights = problem.num_weights;
  p.m = problem.m;
  p.n = problem.n;
  p.k = problem.k;
  p.m_tiles = CeilDiv(problem.m, choice.block_m);
  p.n_tiles = CeilDiv(problem.n, kBlockN);
  p.n_blocks = static_cast<int>(problem.n_blocks());
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  p.group_size = problem.group_size < 0 ? INT_MAX : static_cast<int>(problem.group_size);
  p.block_groups = BlockK(problem.bits) / p.group_size;
  p.block_rest = BlockK(problem.bits) % p.group_size;
  p.groups_per_stage = GroupsPerStage(problem.bits, problem.group_size);
  p.split_k = choice.split_k;
  p.out_float = problem.out == ElementType::kF32;
  p.lhs_aligned =
      problem.k % (kCopyBytes / 2) == 0 && reinterpret_cast<uintptr_t>(p.lhs) % kCopyBytes == 0;
  p.bytes = StageBytesOf(choice.block_m, problem.bits, problem.group_size,
                         problem.scale == ElementType::kF32 ? 4 : 2, p.zero != nullptr);
  p.slot_bytes = p.bytes.total();
  return p;
}

}  // namespace
}  // namespace qmm_sm80

cudaError_t InitializeQmmSm80() {
  for (ElementType lhs : {ElementType::kBf16, ElementType::kF16}) {
    for (ElementType scale : {ElementType::kF32, lhs}) {
      for (int bits : {4, 8}) {
        for (int block_m : {8, 16, 32, 64}) {
          const cudaError_t error = cudaFuncSetAttribute(
              qmm_sm80::Find(lhs, scale, bits, block_m),
              cudaFuncAttributeMaxDynamicSharedMemorySize, qmm_sm80::kMaxSharedBytes);
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchQmmSm80(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, cudaStream_t stream) {
  const qmm_sm80::Params p = qmm_sm80::ParamsOf(problem, buffers, choice);
  const int64_t ctas = p.m_tiles * p.n_tiles * p.split_k * p.batch;
  if (ctas > INT_MAX) return cudaErrorInvalidConfiguration;
  const qmm_sm80::Kernel kernel =
      qmm_sm80::Find(problem.lhs, problem.scale, problem.bits, choice.block_m);
  const int shared_bytes = qmm_sm80::NumStages(choice.block_m, problem.bits) * p.slot_bytes;
  kernel<<<static_cast<unsigned>(ctas), qmm_sm80::kThreads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jaxlowbit
