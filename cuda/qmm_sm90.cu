// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm90: the product of qmm_sm80.cu for more tokens on Hopper, with products of warpgroups whose
// weights come from registers.
//
// Bound. The tensor cores, from about 50 tokens on; so what counts is that they always have a product
// to do, while other warps, or the same ones for their next product, dequantize and copy.
//
// Decomposition. Weights are operand A of the instruction: a strip is its 64 output channels. A CTA
// computes tiles of some strips x tokens (kTiles in config.h), one after the other:
//
//                tokens ──►                       1 or 2 warpgroups multiply, each with strips of
//             ┌──────────┐                        its own and all tokens; one more warp copies.
//   channels  │ strip 0  │ warpgroup 0            Where there are fewer tiles than multiprocessors,
//      │      ├──────────┤                        a cluster of CTAs computes a tile together, each
//      ▼      │ strip 1  │ warpgroup 1            with a part of k.
//             └──────────┘
//
// Pipeline.   last warp: wait for a free slot ─► bulk copies of codes, lhs, scales   (fill.cuh)
//             warpgroups: wait for a full slot ─► dequantize ─► wgmma ─► free it     (multiply.cuh)
//             end of a tile: add the cluster's sums in order ─► store                (store.cuh)
//
// Storage. Codes are in the order of the fragments (device/layout.cuh), which are those of mma.sync:
// warp w of the warpgroup owns rows 16 w to 16 w + 15 of a strip.
//
// Limits: Unsupported() in dispatch.cc.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <utility>

#include "cuda/kernels.h"
#include "cuda/qmm_sm90/fill.cuh"
#include "cuda/qmm_sm90/multiply.cuh"
#include "cuda/qmm_sm90/params.cuh"
#include "cuda/qmm_sm90/store.cuh"
#include "cuda/tensor_map.h"

namespace jaxlowbit {
namespace qmm_sm90 {
namespace {

// One warp. (Elsewhere the kernel is empty: it only runs on sm_90.)
template <class I>
[[maybe_unused]] __device__ void InitBarriers(const Plan& plan, int mate_shift,
                                              Memory memory) {
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
  const bool reduces = I::kKParts > 1 || p.split_shift > 0;
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
    if (reduces) {
      ReleaseToCluster();
      WaitForArrivals();
    }
  } else {
    AcquireRegisters<I::kMultiplyRegisters>();
    const TileMultiplier<I> multiplier(p, share, memory);
    TileStorer<I> storer(p, share, memory);
    if (reduces && threadIdx.x == 0) storer.Expect();
    WaitForArrivals();
    Sums<I> sums;
    for (int number = cluster; number < p.num_tiles; number += clusters) {
      const Tile tile = tile_of(number);
      multiplier.Multiply(sums, cursor);
      if (reduces) {  // the cluster has one tile
        ReleaseToCluster();
        WaitForArrivals();  // every CTA has read its ring
        storer.Reduce(tile, sums);
      } else {
        storer.Store(tile, sums);
      }
    }
    storer.Finish();
  }
  if (cluster_shift > 0) {  // nothing is still to arrive here
    ReleaseToCluster();
    WaitForArrivals();
  }
#endif
}

using KernelFunction = void (*)(Params);

template <typename T, typename S, ZeroKind kZero, int kBits, int... kNumbers>
KernelFunction Find(int tile, std::integer_sequence<int, kNumbers...>) {
  const KernelFunction kernels[] = {QmmSm90Kernel<Instance<T, S, kZero, kBits, kNumbers>>...};
  return kernels[tile];
}

template <typename T, typename S, ZeroKind kZero>
KernelFunction Find(int bits, int tile) {
  constexpr auto kNumbers = std::make_integer_sequence<int, kNumTiles>{};
#ifdef QUICK
  return Find<__nv_bfloat16, __nv_bfloat16, ZeroKind::kNone, 4>(tile, kNumbers);
#else
  return bits == 4 ? Find<T, S, kZero, 4>(tile, kNumbers) : Find<T, S, kZero, 8>(tile, kNumbers);
#endif
}

template <typename T, typename S>
KernelFunction Find(ZeroKind zero, int bits, int tile) {
  return zero == ZeroKind::kNone      ? Find<T, S, ZeroKind::kNone>(bits, tile)
         : zero == ZeroKind::kInteger ? Find<T, S, ZeroKind::kInteger>(bits, tile)
                                      : Find<T, S, ZeroKind::kFloat>(bits, tile);
}

KernelFunction Find(const QuantizedMatmul& problem, int tile) {
  const auto find = [&](auto lhs) {
    using T = decltype(lhs);
    return problem.scale == ElementType::kF32 ? Find<T, float>(problem.zero, problem.bits, tile)
                                              : Find<T, T>(problem.zero, problem.bits, tile);
  };
  return problem.lhs == ElementType::kBf16 ? find(__nv_bfloat16{}) : find(__half{});
}

Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice) {
  const TileShape& tile = kTiles[choice.tile];
  Params p;
  p.packed = buffers.packed;
  p.scale = buffers.scale;
  p.zero = buffers.zero;
  p.zero_bytes = static_cast<int>(problem.zero_bytes());
  p.index = buffers.index;
  p.out_elements = buffers.out;
  p.out_float = problem.out == ElementType::kF32;
  p.aligned = !p.out_float && SupportsBoxes(problem.n);
  p.num_weights = problem.num_weights;
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.n_blocks = static_cast<int>(problem.n_blocks());
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  const int64_t size = problem.group_size;
  p.atoms_per_group = Divider::By(size < 0 ? p.k_blocks : std::max(size / kAtom, int64_t{1}));
  p.groups_per_atom = size > 0 && size < kAtom ? static_cast<int>(kAtom / size) : 1;
  p.tiles_m = static_cast<int>(CeilDiv(problem.m, tile.tokens));
  p.tiles_n = static_cast<int>(CeilDiv(p.n_blocks, tile.cta_strips() * choice.mates));
  p.num_tiles = static_cast<int>(problem.batch) * p.tiles_m * p.tiles_n;
  p.mate_shift = p.split_shift = 0;
  while (1 << p.mate_shift < choice.mates) ++p.mate_shift;
  while (1 << p.split_shift < choice.split_k) ++p.split_shift;
  p.plan = PlanOf(problem, tile);
  return p;
}

}  // namespace
}  // namespace qmm_sm90

cudaError_t InitializeQmmSm90() {
  using namespace qmm_sm90;
  const cudaError_t found = InitializeTensorMaps();
  if (found != cudaSuccess) return found;
  QuantizedMatmul problem;
  for (ElementType lhs : {ElementType::kF16, ElementType::kBf16}) {
    for (ElementType scale : {ElementType::kF32, lhs}) {
      for (ZeroKind zero : {ZeroKind::kNone, ZeroKind::kInteger, ZeroKind::kFloat}) {
        for (int bits : {8, 4}) {
          for (int tile = 0; tile < kNumTiles; ++tile) {
            problem.lhs = lhs, problem.scale = scale, problem.zero = zero, problem.bits = bits;
            const cudaError_t error = cudaFuncSetAttribute(
                Find(problem, tile), cudaFuncAttributeMaxDynamicSharedMemorySize,
                SharedBytes(kTiles[tile]));
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchQmmSm90(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, const Device& device, cudaStream_t stream) {
  using namespace qmm_sm90;
  const TileShape& tile = kTiles[choice.tile];
  Params p = ParamsOf(problem, buffers, choice);
  cudaError_t error = DescribeMatrices(buffers.lhs, problem.lhs, problem.batch, problem.m,
                                       problem.k, tile.tokens / choice.mates, &p.lhs);
  if (error != cudaSuccess) return error;
  if (p.aligned) {
    const int box = std::min(tile.tokens, kStoreTokens);
    error = DescribeMatrices(buffers.out, problem.out, problem.batch, problem.m, problem.n, box,
                             &p.out);
    if (error != cudaSuccess) return error;
  }
  // CTAs stay for tile after tile, unless the sums of one take the place of the next.
  const int resident = device.num_sms * tile.ctas_per_sm / choice.mates;
  const int clusters = choice.split_k * tile.k_parts == 1 ? std::min(p.num_tiles, resident) : p.num_tiles;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(choice.split_k * choice.mates), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = clusters * choice.split_k * choice.mates;
  config.blockDim = tile.threads();
  config.dynamicSmemBytes = p.plan.shared_bytes();
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, Find(problem, choice.tile), p);
}

}  // namespace jaxlowbit
