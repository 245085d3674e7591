// SPDX-License-Identifier: Apache-2.0
//
// rms_norm: per row, sum = x + addend, out = sum / sqrt(mean(sum^2) + epsilon) * scale, between the products of a
// transformer block; without x, sum = addend. With several devices, the addend is a partial sum and is all-reduced
// first (exchange.cuh).
//
// Bound: latency of one row, from the end of the previous kernel to the start of the next product, which loads its
// weights meanwhile. So a CTA keeps one row in registers and loads scales before the PDL wait. A row that is exchanged
// is spread over the CTAs of a cluster, since a single SM sends it too slowly; the order of its sum of squares is the
// same.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device/cluster.cuh"
#include "cuda/device/pair.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/limits.h"
#include "cuda/ops/exchange.cuh"
#include "cuda/ops/rms_norm.h"
#include "cuda/ops/rounded_row.cuh"

namespace jaxlowbit {
namespace {

constexpr int kElements = 8;  // per vector
constexpr int kMaxVectors = static_cast<int>(kMaxRmsNormColumns) / (kMaxThreads * kElements);
static_assert(kMaxVectors == 2);

template <typename T>
struct alignas(16) Vector {
  T at[kElements];
};

template <bool kAligned, typename T>
__device__ Vector<T> Load(const T* pointer, int64_t vector) {
  if constexpr (kAligned) {
    return reinterpret_cast<const Vector<T>*>(pointer)[vector];
  } else {
    Vector<T> value;
#pragma unroll
    for (int i = 0; i < kElements; ++i) value.at[i] = pointer[vector * kElements + i];
    return value;
  }
}
// Loads from L2, for a kernel that does not wait for the previous one: L1 may hold older values.
template <bool kAligned, typename T>
__device__ Vector<T> LoadFromL2(const T* pointer, int64_t vector) {
  static_assert(sizeof(T) == 2);
  Vector<T> value;
  if constexpr (kAligned) {
    reinterpret_cast<uint4&>(value) = __ldcg(reinterpret_cast<const uint4*>(pointer) + vector);
  } else {
    const auto* bits = reinterpret_cast<const unsigned short*>(pointer) + vector * kElements;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      reinterpret_cast<unsigned short&>(value.at[i]) = __ldcg(bits + i);
    }
  }
  return value;
}

template <bool kAligned, typename T>
__device__ void Store(const Vector<T>& value, T* pointer, int64_t vector) {
  if constexpr (kAligned) {
    reinterpret_cast<Vector<T>*>(pointer)[vector] = value;
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) pointer[vector * kElements + i] = value.at[i];
  }
}

// Loads a vector of float32 if `wide`, else of T.
template <bool kAligned, typename T>
__device__ Vector<float> LoadFloats(const void* from, bool wide, int64_t vector) {
  if (wide) return Load<kAligned>(static_cast<const float*>(from), vector);
  const Vector<T> narrow = Load<kAligned>(static_cast<const T*>(from), vector);
  Vector<float> value;
#pragma unroll
  for (int i = 0; i < kElements; ++i) value.at[i] = static_cast<float>(narrow.at[i]);
  return value;
}

// The sum of `value` over all threads of the CTA.
__device__ float SumOfBlock(float value) {
  __shared__ float sums[kMaxThreads / 32];
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0;
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  return value;
}

// The threads that share a row: of a cluster, or of one CTA.
struct Team {
  int row, rank, ctas;  // of this CTA in the cluster
  __device__ int thread() const { return rank * static_cast<int>(blockDim.x) + threadIdx.x; }
  __device__ int threads() const { return ctas * static_cast<int>(blockDim.x); }
};

// 2^cta_shift CTAs share a row.
template <bool kSpread>
__device__ Team FindTeam(int cta_shift) {
  const auto cta = static_cast<int>(blockIdx.x);
  if constexpr (!kSpread) return {cta, 0, 1};
  return {cta >> cta_shift, cta & ((1 << cta_shift) - 1), 1 << cta_shift};
}

// Team sums: call this early, since CTAs write to each other's memory only after all have started.
template <bool kSpread>
__device__ void StartSum(const Team& team) {
#if __CUDA_ARCH__ >= 900
  if (kSpread && team.ctas > 1) ArriveAtCluster();
#endif
}

// The sum of `value` over all threads of the team.
template <bool kSpread>
__device__ float SumOfTeam(const Team& team, float value) {
#if __CUDA_ARCH__ >= 900
  if (kSpread && team.ctas > 1) {
    __shared__ float sums[kMaxThreads / 32];
    const int lane = threadIdx.x % 32, warps = team.threads() / 32;
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    __syncwarp();
    WaitForArrivals();
    if (lane < team.ctas) StoreToRank(&sums[team.thread() / 32], lane, value);
    __syncwarp();
    ReleaseToCluster();
    WaitForArrivals();
    value = lane < warps ? sums[lane] : 0;
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
  }
#endif
  return SumOfBlock(value);
}

// All-reduces the addends.
template <int kVectors>
__device__ void AddParts(const RowExchange& row, const Team& team, int vectors,
                         Vector<float> (&addends)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    row.Send(i * team.threads() + team.thread(), vectors, addends[i].at);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    row.Add(i * team.threads() + team.thread(), vectors, addends[i].at);
  }
}

// Stores the 8-bit values of vector `at` of a row, interleaved with the neighbouring lane's vector: of 16 columns,
// column 8 v + r is stored at 2 r + v.
template <bool kFloat8, bool kAligned, typename T>
__device__ void StoreRounded(const Vector<T>& result, const Divisor& divisor, uint8_t* row, int at,
                             int vectors) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t pairs[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = 4 * i + 2 * j;
      pairs[j] = Round<kFloat8>(divisor.Quotient(static_cast<float>(result.at[column])),
                                divisor.Quotient(static_cast<float>(result.at[column + 1])));
    }
    words[i] = isnan(divisor.scale) ? 0 : __byte_perm(pairs[0], pairs[1], 0x5410);
  }
  // The even lane stores columns 0 to 3 of both vectors, the odd one columns 4 to 7.
  const int odd = at % 2;
  const uint32_t other = __shfl_xor_sync(~0u, words[1 - odd], 1);
  if (at >= vectors) return;
  const uint32_t first = odd ? other : words[0], second = odd ? words[1] : other;
  const uint2 both = {__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362)};
  uint8_t* to = row + int64_t{at} * kElements;
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(to) = both;
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      to[i] = static_cast<uint8_t>((i < 4 ? both.x : both.y) >> 8 * (i % 4));
    }
  }
}

// Type of the normalized rows: T, or 8 bits.
enum class Form { kFloats, kInt8, kE4m3 };

// log2 of the CTAs of a row at most, and threads of each.
constexpr int kMaxSpreadShift = 3, kMaxSpreadThreads = 256;
static_assert(kMaxThreads <= kMaxSpreadThreads << (kMaxSpreadShift - 1));
static_assert(kMaxThreads / 32 <= kMaxExchangeWarps && kElements == kExchangeColumns);

// For the compiler: maximum number of threads of a CTA, and CTAs of an SM.
template <Form kForm, int kVectors, bool kParts>
struct Bounds {
#if __CUDA_ARCH__ >= 900
  static constexpr bool kSpread = kParts;
#else
  static constexpr bool kSpread = false;
#endif
  static constexpr int kThreads = kSpread ? kMaxSpreadThreads : kMaxThreads;
  // An SM has registers for two CTAs of a product, at 96 a thread, and a spread CTA of 128 threads, at 80.
  static constexpr int kCtas = kSpread ? (kVectors == 1 ? 3 : 2) : kForm == Form::kFloats ? 0 : 1;
  // Whether x and the scales are loaded with the addend; with an exchange, a thread of 1024 has too few registers.
  static constexpr bool kLoadsEarly = kSpread || !kParts;
};

// kVectors: vectors per thread. kAligned: all buffers are 16-byte aligned. kParts: the addend is a partial sum.
template <typename T, Form kForm, int kVectors, bool kAligned, bool kParts>
__global__ void __launch_bounds__(Bounds<kForm, kVectors, kParts>::kThreads,
                                  Bounds<kForm, kVectors, kParts>::kCtas)
    RmsNormKernel(const T* x, const void* addend, bool wide_addend, const void* scale,
                  bool wide_scale, T* sum, void* out, float* out_scale, int vectors, float epsilon,
                  int cta_shift, bool was_sent, const __grid_constant__ Exchange exchange) {
  LaunchDependents();
  const Team team = FindTeam<kParts>(cta_shift);
  if (scale != nullptr) StartSum<kParts>(team);
  const int64_t row = int64_t{team.row} * vectors;
  constexpr bool kLoadsEarly = Bounds<kForm, kVectors, kParts>::kLoadsEarly;
  Vector<float> scales[kVectors];
  const auto load_scales = [&] {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = i * team.threads() + team.thread();
      if (scale != nullptr && at < vectors)
        scales[i] = LoadFloats<kAligned, T>(scale, wide_scale, at);
    }
  };
  if constexpr (kLoadsEarly) load_scales();
  const bool sent = kParts && kProductsSend && was_sent;
  if (!sent) WaitForPreviousKernels();
  Vector<float> addends[kVectors];
  Vector<T> sums[kVectors] = {};  // x at first
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * team.threads() + team.thread();
    if (at >= vectors) break;
    if (kLoadsEarly && x != nullptr) sums[i] = LoadFromL2<kAligned>(x, row + at);
    if (!sent) addends[i] = LoadFloats<kAligned, T>(addend, wide_addend, row + at);
  }
  uint32_t round = 0;
  const auto count = [&] {
    __syncwarp();  // all lanes have read the count
    if (threadIdx.x % 32 == 0) *RoundsOf(exchange, team.row, team.thread() / 32) = round;
  };
  if constexpr (kParts) {
    round = LoadFromSystem(RoundsOf(exchange, team.row, team.thread() / 32)) + 1;
    const RowExchange exchanged(exchange, team.row, round, sent);  // loads before the count arrives
    if (!sent) count();
    AddParts(exchanged, team, vectors, addends);
  }
  const auto finish = [&] {
    if (!sent) return;
    WaitForPreviousKernels();  // the product, which reads the count too
    count();
  };
  if constexpr (!kLoadsEarly) load_scales();
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * team.threads() + team.thread();
    if (at >= vectors) break;
    if (!kLoadsEarly && x != nullptr) sums[i] = Load<kAligned>(x, row + at);
#pragma unroll
    for (int j = 0; j < kElements; j += 2) {
      // Rounded in pairs: a single conversion takes eight times as long.
      uint32_t& pair = reinterpret_cast<uint32_t&>(sums[i].at[j]);
      const uint32_t other = Pair<T>::Round(addends[i].at[j], addends[i].at[j + 1]);
      pair = Pair<T>::Round(Pair<T>::Low(pair) + Pair<T>::Low(other),
                            Pair<T>::High(pair) + Pair<T>::High(other));
      squares += Pair<T>::Low(pair) * Pair<T>::Low(pair);
      squares += Pair<T>::High(pair) * Pair<T>::High(pair);
    }
    Store<kAligned>(sums[i], sum, row + at);
  }
  if (scale == nullptr) return finish();
  const float mean = SumOfTeam<kParts>(team, squares) / static_cast<float>(vectors * kElements);
  const float factor = rsqrtf(mean + epsilon);
  Vector<T> results[kVectors] = {};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * team.threads() + team.thread();
    if (at >= vectors) break;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      results[i].at[j] = T(static_cast<float>(sums[i].at[j]) * factor * scales[i].at[j]);
      largest = max(largest, MagnitudeBits(static_cast<float>(results[i].at[j])));
    }
    if constexpr (kForm == Form::kFloats)
      Store<kAligned>(results[i], static_cast<T*>(out), row + at);
  }
  finish();
  if constexpr (kForm != Form::kFloats) {
    constexpr bool kFloat8 = kForm == Form::kE4m3;
    const Divisor divisor(BlockMax(largest), kMaxValue<kFloat8>);
    if (threadIdx.x == 0) out_scale[blockIdx.x] = divisor.scale;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      StoreRounded<kFloat8, kAligned>(results[i], divisor,
                                      static_cast<uint8_t*>(out) + row * kElements,
                                      i * blockDim.x + threadIdx.x, vectors);
    }
  }
}

template <typename T>
using KernelFunction = void (*)(const T*, const void*, bool, const void*, bool, T*, void*, float*,
                                int, float, int, bool, Exchange);

// Template arguments of the kernel, as values.
struct Variant {
  Form form;
  bool two_vectors, aligned, parts;
};

template <typename T, Form kForm, bool kParts>
KernelFunction<T> Find(const Variant& variant) {
  if (variant.aligned) {
    return variant.two_vectors ? RmsNormKernel<T, kForm, kMaxVectors, true, kParts>
                               : RmsNormKernel<T, kForm, 1, true, kParts>;
  }
  return variant.two_vectors ? RmsNormKernel<T, kForm, kMaxVectors, false, kParts>
                             : RmsNormKernel<T, kForm, 1, false, kParts>;
}

// 8-bit results are supported only without an exchange.
template <typename T>
KernelFunction<T> Find(const Variant& variant) {
  switch (variant.form) {
    case Form::kInt8:
      return Find<T, Form::kInt8, false>(variant);
    case Form::kE4m3:
      return Find<T, Form::kE4m3, false>(variant);
    case Form::kFloats:
      break;
  }
  return variant.parts ? Find<T, Form::kFloats, true>(variant)
                       : Find<T, Form::kFloats, false>(variant);
}

Form FormOf(ElementType out) {
  return out == ElementType::kInt8   ? Form::kInt8
         : out == ElementType::kE4m3 ? Form::kE4m3
                                     : Form::kFloats;
}

// log2 of the CTAs that share a row: fewer for many rows, which leave more SMs to the next product.
int CtaShift(const RmsNorm& norm, int warps, const Device& device) {
  if (norm.exchange.parts == 1 || device.architecture < 90) return 0;
  int shift = norm.rows <= 8 ? kMaxSpreadShift : kMaxSpreadShift - 1;
  while (1 << shift > warps) --shift;
  return shift;
}

template <typename T>
cudaError_t Launch(const RmsNorm& norm, const Device& device, cudaStream_t stream) {
  const int vectors = static_cast<int>(norm.columns / kElements);
  const int warps = static_cast<int>(std::min<int64_t>(kMaxThreads / 32, CeilDiv(vectors, 32)));
  const int cta_shift = CtaShift(norm, warps, device), ctas = 1 << cta_shift;
  const LaunchConfig launch(norm.rows * ctas, static_cast<int>(CeilDiv(warps, ctas)) * 32, 0,
                            stream, device.compute_capability >= 90, ctas > 1 ? ctas : 0);
  const bool aligned = IsAligned(norm.x) && IsAligned(norm.addend) && IsAligned(norm.scale) &&
                       IsAligned(norm.sum) && IsAligned(norm.out);
  const auto kernel =
      Find<T>({FormOf(norm.out_type), vectors > kMaxThreads, aligned, norm.exchange.parts > 1});
  return cudaLaunchKernelEx(&launch.config, kernel, static_cast<const T*>(norm.x), norm.addend,
                            norm.addend_type == ElementType::kF32, norm.scale,
                            norm.scale_type == ElementType::kF32, static_cast<T*>(norm.sum),
                            norm.out, norm.out_scale, vectors, norm.epsilon, cta_shift, norm.sent,
                            norm.exchange);
}

template <typename T>
cudaError_t Prepare(const Variant& variant) {
  return PreferSharedMemory(reinterpret_cast<const void*>(Find<T>(variant)));
}

}  // namespace

cudaError_t PrepareRmsNorm() {
  for (Form form : {Form::kFloats, Form::kInt8, Form::kE4m3}) {
    for (bool two_vectors : {false, true}) {
      for (bool aligned : {false, true}) {
        for (bool parts : {false, true}) {
          if (parts && form != Form::kFloats) continue;
          const Variant variant = {form, two_vectors, aligned, parts};
          for (const auto prepare : {Prepare<__nv_bfloat16>, Prepare<__half>}) {
            const cudaError_t error = prepare(variant);
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchRmsNorm(const RmsNorm& norm, const Device& device, cudaStream_t stream) {
  if (norm.rows == 0) return cudaSuccess;
  const auto launch = norm.type == ElementType::kBf16 ? Launch<__nv_bfloat16> : Launch<__half>;
  return launch(norm, device, stream);
}

}  // namespace jaxlowbit
