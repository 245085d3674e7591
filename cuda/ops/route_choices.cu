// SPDX-License-Identifier: Apache-2.0
//
// route_choices: logits of the experts, the largest, and their softmax, for the few tokens of a decode step.
//
// Bound: the latency of a row of x, of two sums and of the choices, from the end of the previous kernel on. A cluster has
// a token, and each of its CTAs a part of the columns:
//
//   weights of the part ──► registers (the rest to L2)      before the PDL wait
//   x of the part ──► products ──► sums of the CTA          a thread has the same experts in all of its rows
//   sums of all CTAs ──► rank 0 ──► one warp                logits, choices, softmax
//
// Sums are added in a fixed order: rows of a thread, lanes, warps, CTAs.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>

#include "cuda/device/barrier.cuh"
#include "cuda/device/bulk.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/limits.h"
#include "cuda/ops/route_choices.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 512;
constexpr int kBatch = 4;  // vectors whose columns of x are loaded from shared memory together
constexpr int kPrefetchBytes = 4096;
constexpr int kMaxPerLane = kMaxRoutedExperts / 32;
static_assert(kMaxRoutedExperts <= kThreads && kMaxRoutedChoices <= 32);

template <typename W>
struct alignas(kAlignment) Vector {
  static constexpr int kCount = kAlignment / sizeof(W);
  W at[kCount];
};

// Vectors that a thread loads together, and that a CTA does.
template <typename W>
inline constexpr int kAhead = 64 / Vector<W>::kCount;
template <typename W>
inline constexpr int kTogether = kAhead<W> * kThreads;
static_assert(kMinRoutedExperts % Vector<__half>::kCount == 0);

__device__ float LoadFloat(const void* from, ElementType type, int64_t at) {
  switch (type) {
    case ElementType::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
    case ElementType::kF16:
      return __half2float(static_cast<const __half*>(from)[at]);
    default:
      return static_cast<const float*>(from)[at];
  }
}

// The weights of the columns of one CTA, as vectors of neighbouring experts. A row has 2^shift vectors.
template <typename W, bool kAligned>
class Weights {
 public:
  __device__ Weights(const RouteChoices& p, int rank)
      : shift_(31 - __clz(p.experts / Vector<W>::kCount)),
        count_(static_cast<int>(p.columns / kRouteCtas) << shift_),
        data_(static_cast<const W*>(p.router) + rank * (p.columns / kRouteCtas) * p.experts) {}

  __device__ int count() const { return count_; }
  __device__ int shift() const { return shift_; }

  // Loads this thread's vectors from number `first` on, a multiple of kTogether<W>; zeros behind the last one.
  __device__ void Load(int first, Vector<W> (&ahead)[kAhead<W>]) const {
#pragma unroll
    for (int i = 0; i < kAhead<W>; ++i) {
      const int at = first + i * kThreads + threadIdx.x;
      ahead[i] = {};
      if (at >= count_) continue;
      if constexpr (kAligned) {
        ahead[i] = reinterpret_cast<const Vector<W>*>(data_)[at];
      } else {
#pragma unroll
        for (int j = 0; j < Vector<W>::kCount; ++j) {
          ahead[i].at[j] = data_[at * Vector<W>::kCount + j];
        }
      }
    }
  }

  // Prefetches the vectors from number `first` on.
  __device__ void Prefetch(int first) const {
    if constexpr (kAligned) {
      const char* data = reinterpret_cast<const char*>(data_);
      const int bytes = count_ * static_cast<int>(kAlignment);
#pragma unroll 1
      for (int at = first * static_cast<int>(kAlignment) + threadIdx.x * kPrefetchBytes; at < bytes;
           at += kThreads * kPrefetchBytes) {
        PrefetchToL2(data + at, static_cast<uint32_t>(min(bytes - at, kPrefetchBytes)));
      }
    }
  }

  // Adds the products of x, of this CTA's columns, with this thread's vectors from number `first` on.
  __device__ void AddProducts(int first, const Vector<W> (&ahead)[kAhead<W>], const float* x,
                              float (&sums)[Vector<W>::kCount]) const {
    const int left = count_ - first - static_cast<int>(threadIdx.x);
    x += (first + static_cast<int>(threadIdx.x)) >> shift_;
#pragma unroll
    for (int i = 0; i < kAhead<W>; i += kBatch) {
      if (first + i * kThreads >= count_) return;
      float values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        values[j] = (i + j) * kThreads < left ? x[(i + j) * (kThreads >> shift_)] : 0;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int e = 0; e < Vector<W>::kCount; ++e) {
          sums[e] = fmaf(values[j], static_cast<float>(ahead[i + j].at[e]), sums[e]);
        }
      }
    }
  }

 private:
  const int shift_, count_;
  const W* const data_;
};

// The sum over the CTA of the sums of expert `threadIdx.x`; other threads get 0. A row has 2^shift vectors.
template <int kCount>
__device__ float SumOfCta(float (&sums)[kCount], int shift, int experts) {
  __shared__ float parts[kThreads * kCount];
  for (int lanes = 16; lanes >= 1 << shift; lanes /= 2) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], lanes);
  }
  const auto thread = static_cast<int>(threadIdx.x);
  const int part_shift = max(shift, 5);  // log2 of the threads with a part of the sums
  if (thread % 32 < 1 << shift) {
    const int vector = thread & ((1 << shift) - 1);
    float* part = parts + (thread >> part_shift) * experts + vector * kCount;
#pragma unroll
    for (int j = 0; j < kCount; ++j) part[j] = sums[j];
  }
  __syncthreads();
  float sum = 0;
  if (thread >= experts) return sum;
#pragma unroll 4
  for (int i = 0; i < kThreads >> part_shift; ++i) sum += parts[i * experts + thread];
  return sum;
}

// Larger for larger numbers, and not 0; NaN is the largest.
__device__ uint32_t KeyOf(float x) {
  const uint32_t bits = __float_as_uint(x);
  return isnan(x) ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ float NumberOf(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 1u << 31 : ~key);
}

// The keys of the logits of a token in one warp: lane l has experts 32 i + l.
class Candidates {
 public:
  __device__ Candidates(const uint32_t* keys, int experts) : experts_(experts) {
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      keys_[i] = Expert(i) < experts ? keys[Expert(i)] : 0;
    }
  }

  // The largest key, and the first of its experts; expert 0 after all have been removed.
  __device__ uint32_t Largest(int* expert) const {
    uint32_t best = 0;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      if (32 * i >= experts_) break;
      if (keys_[i] > best) best = keys_[i], own = Expert(i);
    }
    const uint32_t largest = __reduce_max_sync(~0u, best);
    *expert = __reduce_min_sync(~0u, best == largest ? own : INT_MAX);
    return largest;
  }

  __device__ void Remove(int expert) {
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      if (Expert(i) == expert) keys_[i] = 0;
    }
  }

 private:
  static __device__ int Expert(int i) { return 32 * i + static_cast<int>(threadIdx.x); }

  const int experts_;
  uint32_t keys_[kMaxPerLane];
};

// Chooses the experts of a token by the keys of all logits, in the first warp: lane i stores choice i.
__device__ void Choose(const RouteChoices& p, int token, const uint32_t* keys) {
  const auto lane = static_cast<int>(threadIdx.x);
  Candidates candidates(keys, p.experts);
  int expert = 0;
  float largest = 0, logit = 0;
#pragma unroll 1
  for (int i = 0; i < p.top; ++i) {
    int chosen;
    const float next = NumberOf(candidates.Largest(&chosen));
    candidates.Remove(chosen);
    if (i == 0) largest = next;
    if (lane == i) expert = chosen, logit = next;
  }
  const float weight = lane < p.top ? expf(logit - largest) : 0;
  float total = weight;
  if (!p.normalized) {
    total = 0;
#pragma unroll 1
    for (int e = lane; e < p.experts; e += 32) total += expf(NumberOf(keys[e]) - largest);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
  if (lane >= p.top) return;
  const int64_t choice = int64_t{token} * p.top + lane;
  p.expert[choice] = expert;
  p.weight[choice] = weight / total;
}

// Reads a CTA's columns of x.
__device__ void LoadColumns(const RouteChoices& p, int token, int rank, float* to) {
  const int columns = static_cast<int>(p.columns) / kRouteCtas;
  const int64_t first = token * p.columns + rank * columns;
#pragma unroll 1
  for (int i = threadIdx.x; i < columns; i += kThreads) to[i] = LoadFloat(p.x, p.x_type, first + i);
  __syncthreads();
}

// The key of an expert, from its sums of all CTAs.
__device__ uint32_t KeyOfSums(const float* of_ranks) {
  float sum = 0;
#pragma unroll
  for (int rank = 0; rank < kRouteCtas; ++rank) sum += of_ranks[rank * kMaxRoutedExperts];
  return KeyOf(sum);
}

// Cluster t has token t.
template <typename W, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) RouteKernel(const __grid_constant__ RouteChoices p) {
#if __CUDA_ARCH__ >= 900
  __shared__ float of_ranks[kRouteCtas * kMaxRoutedExperts];
  __shared__ float x[kMaxRmsNormColumns / kRouteCtas];
  __shared__ uint32_t keys[kMaxRoutedExperts];
  __shared__ uint64_t all_sent;
  LaunchDependents();
  const auto barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&all_sent));
  const auto thread = static_cast<int>(threadIdx.x);
  const int rank = ClusterRank(), token = static_cast<int>(blockIdx.x) / kRouteCtas;
  if (rank == 0 && thread == 0) {
    InitBarrier(barrier, 1);
    PublishBarriers();
    ArriveExpecting(barrier, kRouteCtas * p.experts * static_cast<int>(sizeof(float)));
  }
  __syncwarp();
  ArriveAtCluster();
  const Weights<W, kAligned> weights(p, rank);
  Vector<W> ahead[kAhead<W>];
  weights.Load(0, ahead);
  weights.Prefetch(kTogether<W>);
  const bool biased = p.bias != nullptr && rank == 0 && thread < p.experts;
  const float bias = biased ? LoadFloat(p.bias, p.bias_type, thread) : 0;
  WaitForArrivals();  // the barrier exists
  WaitForPreviousKernels();
  LoadColumns(p, token, rank, x);
  float sums[Vector<W>::kCount] = {};
  for (int first = 0;;) {
    weights.AddProducts(first, ahead, x, sums);
    first += kTogether<W>;
    if (first >= weights.count()) break;
    weights.Load(first, ahead);
  }
  const float sum = SumOfCta(sums, weights.shift(), p.experts) + bias;
  if (thread < p.experts) {
    const auto place = static_cast<uint32_t>(
        __cvta_generic_to_shared(of_ranks + rank * kMaxRoutedExperts + thread));
    StoreRemote(MapToRank(place, 0), __float_as_uint(sum), MapToRank(barrier, 0));
  }
  if (rank > 0) return;
  WaitForCluster(barrier, 0);
  if (thread < p.experts) keys[thread] = KeyOfSums(of_ranks + thread);
  __syncthreads();
  if (thread < 32) Choose(p, token, keys);
#endif
}

template <typename W>
cudaError_t Launch(const RouteChoices& route, cudaStream_t stream) {
  const LaunchConfig launch(int64_t{route.tokens} * kRouteCtas, kThreads, 0, stream, route.pdl,
                            kRouteCtas);
  return cudaLaunchKernelEx(&launch.config,
                            IsAligned(route.router) ? RouteKernel<W, true> : RouteKernel<W, false>,
                            route);
}

template <typename W>
cudaError_t Prepare() {
  for (const void* kernel : {reinterpret_cast<const void*>(RouteKernel<W, true>),
                             reinterpret_cast<const void*>(RouteKernel<W, false>)}) {
    const cudaError_t error = PreferSharedMemory(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t PrepareRouteChoices() {
  for (const auto prepare : {Prepare<float>, Prepare<__nv_bfloat16>, Prepare<__half>}) {
    const cudaError_t error = prepare();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchRouteChoices(const RouteChoices& route, cudaStream_t stream) {
  const auto launch = route.router_type == ElementType::kF32    ? Launch<float>
                      : route.router_type == ElementType::kBf16 ? Launch<__nv_bfloat16>
                                                                : Launch<__half>;
  return launch(route, stream);
}

}  // namespace jaxlowbit
