// SPDX-License-Identifier: Apache-2.0
//
// Reduces the partial sums of the stream-K tail. Every part of a tail tile writes its partial sums to the workspace in
// register order. A separate kernel adds them in the order of the parts, so that results repeat bit for bit, and stores
// results through the epilogue.
#pragma once

#include <type_traits>

#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm90/store.cuh"

namespace jaxlowbit::sm90 {

// Stores the partial sums of a warpgroup's strips: the bits of integers, or floats times their factors.
template <class I>
__device__ void StorePartial(const Params& p, int partial, const Accumulators<I>& acc,
                             const Factors<I>& factors) {
  constexpr int kBlocks = I::kM / 8;
  const int strip = static_cast<int>(threadIdx.x) / 128 * I::kStrips;
  float* own = p.partial_sums + FirstPartialSum(partial, I::kCtaStrips, I::kM) +
               strip * kBlocks * kBlockSums + threadIdx.x % 128 * 4;
#pragma unroll
  for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float* four = acc[s] + block * 4;
      auto* sums = reinterpret_cast<float4*>(own + (s * kBlocks + block) * kBlockSums);
      if (I::kIsInt8 && p.out_integers) {
        *sums = make_float4(four[0], four[1], four[2], four[3]);
      } else {
        *sums = make_float4(four[0] * factors[s][0], four[1] * factors[s][0],
                            four[2] * factors[s][1], four[3] * factors[s][1]);
      }
    }
  }
}

inline constexpr int kReduceThreads = 128;
inline constexpr int kMaxReduceCtas = 8;  // of a multiprocessor
inline constexpr int kReduceSharedBytes =
    8 * static_cast<int>(kAtom) * 2;  // static: 8 rows of a strip

// Adds the partial sums of all parts, for a thread's four accumulators of a block.
template <typename Sum>
__device__ inline void AddPartials(const Sum* first, int64_t step, int splits, Sum (&sum)[4]) {
  using Four = std::conditional_t<std::is_same_v<Sum, int>, int4, float4>;
  Four values[kMaxSplits];
#pragma unroll
  for (int part = 0; part < kMaxSplits; ++part) {  // all loads first, to overlap their latencies
    if (part < splits) values[part] = *reinterpret_cast<const Four*>(first + part * step);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = Sum{0};
#pragma unroll
  for (int part = 0; part < kMaxSplits; ++part) {
    if (part >= splits) break;
    sum[0] += values[part].x, sum[1] += values[part].y;
    sum[2] += values[part].z, sum[3] += values[part].w;
  }
}

// Stores 8 rows of 64 channels from `m0` on, assembled in `shared` in chunks of 16 bytes with permuted columns.
template <typename T>
__device__ void StoreTogether(const Params& p, const Tile& tile, int strip, int m0,
                              const float (&values)[4], uint32_t shared) {
  const Batched<int> schedule = ScheduleOf(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t matrices[2] = {Pair<T>::Round(values[0], values[1]),
                                Pair<T>::Round(values[2], values[3])};
  StoreTransposed(shared + lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16, matrices);
  __syncthreads();
  const int row = threadIdx.x / 8, column = threadIdx.x % 8;
  const int channel = strip * static_cast<int>(kAtom) + column * 8;
  const int end = schedule.Rows(tile.batch);
  if (row >= 8 || m0 + row >= end || channel >= p.n) return;
  T* out = static_cast<T*>(p.out_data) + (schedule.Row(tile.batch, m0) + row) * p.n;
  *reinterpret_cast<uint4*>(out + channel) = LoadShared16(shared + row * 128 + (column ^ row) * 16);
}

// A CTA computes 8 rows of a strip of results. Grid: blocks of rows of a tile, strips of a tile, tail tiles.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    ReduceTailKernel(const __grid_constant__ Params p, int strips, int tile_m) {
#if __CUDA_ARCH__ == 900
  __shared__ __align__(16) uint8_t shared[kReduceSharedBytes];
  LaunchDependents();
  const EpilogueParams& e = p.epilogue;
  const Batched<int> schedule = ScheduleOf(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, s = blockIdx.y;
  const Tile tile = TileOf(p, p.whole_tiles + blockIdx.z, strips, tile_m);
  const int strip = (e.gated ? tile.strip / 2 : tile.strip) + s, m0 = tile.m0 + block * 8;
  WaitForPreviousKernels();
  if (strip >= p.n_blocks || m0 >= schedule.Rows(tile.batch)) return;

  const int64_t step = FirstPartialSum(1, strips, tile_m);
  const float* first = p.partial_sums + FirstPartialSum(blockIdx.z * p.splits, strips, tile_m) +
                       ((e.gated ? 2 * s : s) * (tile_m / 8) + block) * kBlockSums +
                       threadIdx.x * 4;
  const int m = m0 + lane % 4 * 2, n = strip * static_cast<int>(kAtom) + warp * 16 + lane / 4;
  const int64_t offset = schedule.Row(tile.batch, m) * p.n + n;
  const auto exists = [&](int i) {
    return m + i % 2 < schedule.Rows(tile.batch) && n + i / 2 * 8 < p.n;
  };
  const auto at = [&](int i) { return offset + i % 2 * p.n + i / 2 * 8; };
  if (p.out_integers) {
    int sums[4];
    AddPartials(reinterpret_cast<const int*>(first), step, p.splits, sums);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (exists(i)) static_cast<int*>(p.out_data)[at(i)] = sums[i];
    }
    return;
  }
  float values[4];
  AddPartials(first, step, p.splits, values);
  if (e.any) {
    float up[4] = {}, residual[4];
    if (e.gated) AddPartials(first + tile_m / 8 * kBlockSums, step, p.splits, up);
    const int64_t product = schedule.Position(tile.batch);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] += LoadBias<T>(e, product, p.n, n + i / 2 * 8);
      if (e.gated) up[i] += LoadBias<T>(e, product + 1, p.n, n + i / 2 * 8);
      residual[i] = exists(i) ? LoadResidual<T>(e, at(i)) : 0.0f;
    }
    Finish(e, up, residual, values);
  }
  if (p.aligned) return StoreTogether<T>(p, tile, strip, m0, values, SharedAddress(shared));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!exists(i)) continue;
    if (p.out_float) {
      static_cast<float*>(p.out_data)[at(i)] = values[i];
    } else {
      static_cast<T*>(p.out_data)[at(i)] = T(values[i]);
    }
  }
#endif
}

}  // namespace jaxlowbit::sm90
