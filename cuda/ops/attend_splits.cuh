// SPDX-License-Identifier: Apache-2.0
//
// The second kernel of attend.cu: combines the partial sums of the splits from the workspace, in a fixed order.
#pragma once

#include "cuda/ops/attend.cuh"

namespace jaxlowbit::attend {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kCombineColumns = 128;  // of a CTA: a vector of 4 for each lane
inline constexpr int kHeld = 8;              // splits that a warp loads at a time

// Computes the factor of each split from its maximum and returns the total weight. Lane i has the factors of splits i
// and i + 32.
__device__ inline float FactorsOf(const float2* stats, int splits,
                                  float (&factors)[kMaxSplits / 32]) {
  float highest = kLowest, total = 0;
  float2 own[kMaxSplits / 32];
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = 32 * i + Lane();
    own[i] = split < splits ? stats[split] : make_float2(kLowest, 0);
    highest = fmaxf(highest, own[i].x);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, lanes));
  }
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    factors[i] = Exp2(own[i].x - highest);
    total += factors[i] * own[i].y;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
  return total;
}

// out[row] = the sum of a head's splits. Out may overwrite the query, which AttendKernel has read.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const float* sums, const float2* stats, T* out, int splits, int size) {
  __shared__ float4 merged[kCombineWarps][32];
  LaunchDependents();  // the output projection loads weights while AttendKernel runs
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kCombineColumns + 4 * lane;
  const float* first = sums + (row * splits + warp) * size + column;
  const float2* own_stats = stats + row * splits;
  const int own_column = blockIdx.y * kCombineColumns + threadIdx.x;
  T* const result = out + row * size + own_column;
  const int own_splits = column < size ? splits - warp : 0;
  WaitForPreviousKernels(LowWord(first) ^ LowWord(own_stats) ^ LowWord(result) ^ own_splits);
  // Warp w adds splits w, w + 4, ...; the first ones are loaded before their factors are known.
  float4 held[kHeld];
  const auto load = [&](int begin) {
    const float* at = first + begin * size;
#pragma unroll
    for (int i = 0; i < kHeld; ++i, at += kCombineWarps * size) {
      held[i] = begin + i * kCombineWarps < own_splits ? *reinterpret_cast<const float4*>(at)
                                                       : make_float4(0, 0, 0, 0);
    }
  };
  load(0);
  float factors[kMaxSplits / 32];  // of splits lane, lane + 32
  const float total = FactorsOf(own_stats, splits, factors);

  static_assert(kHeld * kCombineWarps == 32);
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int pass = 0; pass < kMaxSplits / 32; ++pass) {
    if (32 * pass >= splits) break;
    if (pass > 0) load(32 * pass);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float factor = __shfl_sync(~0u, factors[pass], i * kCombineWarps + warp);
      sum.x += factor * held[i].x;
      sum.y += factor * held[i].y;
      sum.z += factor * held[i].z;
      sum.w += factor * held[i].w;
    }
  }
  merged[warp][lane] = sum;
  __syncthreads();
  const float whole = total == 0 ? 0 : 1 / total;
  const auto* floats = reinterpret_cast<const float*>(merged);
  if (own_column >= size) return;
  float value = 0;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) value += floats[w * kCombineColumns + threadIdx.x];
  *result = T(value * whole);
}
static_assert(kCombineThreads == kCombineColumns);

}  // namespace jaxlowbit::attend
