// SPDX-License-Identifier: Apache-2.0

#include <cuda_bf16.h>

#include <cmath>

#include "cuda/check/random.cuh"
#include "cuda/check/walk_model.h"
#include "cuda/device/layout.cuh"

namespace jaxlowbit::check {
namespace {

using sm90_stream::kWalkDown;
using sm90_stream::kWalkGateUp;
using sm90_stream::kWalkOut;
using sm90_stream::kWalkQkv;
using sm90_stream::kWalkSteps;
using sm90_stream::WalkEntry;
using sm90_stream::WalkShape;
using T = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kGroup = 128;

__global__ void FillWords(uint32_t* words, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    words[i] = Hash(i + (seed << 40));
  }
}

// kScale: magnitudes from 0.5 to 1.5 times `unit` and random signs, since the mean of codes is not 0; kNorm: from 0.5 to
// 1.5.
enum class Fill { kScale, kNorm, kNormal };

__global__ void FillFloats(T* data, int64_t count, uint64_t seed, float unit, Fill fill) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const uint64_t x = i + (seed << 40);
    const float magnitude = unit * (0.5f + Hash(x) * 0x1p-32f);
    const bool negative = fill == Fill::kScale && Hash(~x) % 2 != 0;
    data[i] = T(fill == Fill::kNormal ? Normal(x) : negative ? -magnitude : magnitude);
  }
}

__global__ void StoreEntries(const uint32_t* pairs, WalkEntry* entries, int count, uint32_t epoch) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i < count) entries[i] = static_cast<uint64_t>(epoch) << 32 | pairs[i];
}

// A CTA normalizes a row, in double except where the definition rounds.
__global__ void NormalizeRow(const T* x, int64_t stride, const T* scale, T* out, int width) {
  __shared__ double sums[kThreads];
  const T* row = x + blockIdx.x * stride;
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    const double value = static_cast<float>(row[i]);
    sum += value * value;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  const auto factor = static_cast<float>(1 / sqrt(sums[0] / width + 1e-5));
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    out[int64_t{blockIdx.x} * width + i] =
        T(static_cast<float>(row[i]) * factor * static_cast<float>(scale[i]));
  }
}

struct Weight {
  const uint32_t* packed;
  const T* scales;
  int k;
};

// The weight of channel n and input feature k, by the table of docs/layout.md.
__device__ double WeightOf(const Weight& w, int k, int n) {
  const uint32_t* atom = w.packed + (int64_t{n / 64} * (w.k / 64) + k / 64) * (kAtomBytes<4> / 4);
  const int nn = n % 64, kk = k % 64, lane = nn / 16 * 32 + nn % 8 * 4 + kk / 2 % 4;
  const int shift = kk % 2 * 16 + kk / 8 % 2 * 8 + nn / 8 % 2 * 4;
  const int code = static_cast<int>(atom[lane * 4 + kk / 16] >> shift & 15);
  const int64_t group = int64_t{n / 64} * (w.k / kGroup) + k / kGroup;
  return (code - 8) * double{static_cast<float>(w.scales[group * 64 + GroupPosition(nn)])};
}

struct Bounded {
  double value, bound;
};

// Element `n` of a product, by a warp. Terms of normalized activations may differ by a rounding.
__device__ Bounded Sum(const Weight& w, const T* lhs, int n) {
  double sum = 0, magnitude = 0, largest = 0;
  for (int k = static_cast<int>(threadIdx.x) % 32; k < w.k; k += 32) {
    const double term = WeightOf(w, k, n) * static_cast<double>(static_cast<float>(lhs[k]));
    sum += term;
    magnitude += fabs(term);
    largest = fmax(largest, fabs(term));
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
    magnitude += __shfl_xor_sync(~0u, magnitude, lanes);
    largest = fmax(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  return {sum, 0x1p-17 * magnitude + 0x1p-6 * largest};
}

// A warp compares one element. `second`: the weight of up, or null; `residual`: null or [rows][n].
__global__ void CompareStep(Weight first, Weight second, const T* lhs, int64_t lhs_stride,
                            const T* residual, const T* out, int rows, int n,
                            unsigned long long* worst) {
  const int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32;
  if (i >= int64_t{rows} * n) return;
  const int column = static_cast<int>(i % n);
  const T* row = lhs + i / n * lhs_stride;
  Bounded result = Sum(first, row, column);
  if (second.packed != nullptr) {
    const Bounded up = Sum(second, row, column);
    result.value /= 1 + exp(-result.value);
    result.bound = 1.13 * result.bound + 0x1p-20 * fabs(result.value);
    result.bound =
        fabs(result.value) * up.bound + fabs(up.value) * result.bound + up.bound * result.bound;
    result.value *= up.value;
  }
  if (residual != nullptr) {
    const double addend = static_cast<float>(residual[i]);
    result.bound += 0x1p-8 * fabs(result.value);  // the product is rounded, too
    result.value += addend;
    result.bound += 0x1p-24 * (fabs(result.value) + fabs(addend));
  }
  const double bound = result.bound + 0x1p-8 * (fabs(result.value) + result.bound) + 1e-30;
  double ratio = fabs(static_cast<double>(static_cast<float>(out[i])) - result.value) / bound;
  if (!(ratio < 1e9)) ratio = 1e9;  // NaN
  if (threadIdx.x % 32 == 0) {
    atomicMax(worst, static_cast<unsigned long long>(__double_as_longlong(ratio)));
  }
}

__global__ void AddDigest(const uint16_t* data, int64_t count, unsigned long long* digest) {
  unsigned long long sum = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    sum += static_cast<unsigned long long>(Hash((static_cast<uint64_t>(data[i]) << 40) + i));
  }
  atomicAdd(digest, sum);
}

void RandomFloats(const DeviceBuffer& buffer, uint64_t seed, float unit, Fill fill) {
  FillFloats<<<1024, kThreads>>>(static_cast<T*>(buffer.data()), buffer.bytes() / 2, seed, unit,
                                 fill);
  Check(cudaGetLastError(), "FillFloats");
}

}  // namespace

WalkModel::WalkModel(const WalkShape& shape)
    : shape_(shape),
      counts_(kWalkSteps * 8),
      error_(8),
      normalized_(int64_t{shape.rows} * shape.width * 2),
      worst_(8) {
  for (int step = 0; step < kWalkSteps; ++step) {
    const int64_t n = shape.n(step), k = shape.k(step);
    const int64_t elements = n * shape.weights(step) * k * shape.layers;
    packed_.emplace_back(elements / 2);
    scales_.emplace_back(elements / kGroup * 2);
    results_.emplace_back(shape.rows * n / 2 * 8);
    traces_.emplace_back(shape.layers * TraceCount(step) * 2);
    FillWords<<<4096, kThreads>>>(static_cast<uint32_t*>(packed_[step].data()), elements / 8,
                                  static_cast<uint64_t>(step) + 1);
    Check(cudaGetLastError(), "FillWords");
    // Weights of variance 1 / k: codes have a standard deviation of 4.6.
    RandomFloats(scales_[step], step + 11, 1 / (4.6f * std::sqrt(static_cast<float>(k))),
                 Fill::kScale);
  }
  for (int i = 0; i < 2; ++i) {
    norms_.emplace_back(int64_t{shape.layers} * shape.width * 2);
    RandomFloats(norms_[i], 21 + i, 1, Fill::kNorm);
    first_.emplace_back(shape.rows * int64_t{i == 0 ? shape.width : shape.qkv} * 2);
    RandomFloats(first_[i], 31 + i, 1, Fill::kNormal);
  }
  Check(cudaDeviceSynchronize(), "WalkModel");
}

int64_t WalkModel::layer_bytes() const {
  int64_t bytes = 0;
  for (int step = 0; step < kWalkSteps; ++step) {
    bytes += (packed_[step].bytes() + scales_[step].bytes()) / shape_.layers;
  }
  return bytes;
}

int64_t WalkModel::TraceCount(int step) const { return int64_t{shape_.rows} * shape_.n(step); }

sm90_stream::WalkBuffers WalkModel::buffers(bool trace, unsigned long long* stamps) const {
  sm90_stream::WalkBuffers b = {};
  for (int step = 0; step < kWalkSteps; ++step) {
    b.packed[step] = packed_[step].data();
    b.scales[step] = scales_[step].data();
    b.results[step] = static_cast<WalkEntry*>(results_[step].data());
    b.trace[step] = trace ? traces_[step].data() : nullptr;
  }
  for (int i = 0; i < 2; ++i) b.norms[i] = norms_[i].data();
  b.counts = static_cast<unsigned long long*>(counts_.data());
  b.error = static_cast<unsigned long long*>(error_.data());
  b.stamps = stamps;
  return b;
}

void WalkModel::Start() {
  for (const auto& result : results_) {
    Check(cudaMemsetAsync(result.data(), 0, result.bytes()), "cudaMemset");
  }
  Check(cudaMemsetAsync(counts_.data(), 0, counts_.bytes()), "cudaMemset");
  Check(cudaMemsetAsync(error_.data(), 0, error_.bytes()), "cudaMemset");
  for (int i = 0; i < 2; ++i) {
    const int step = i == 0 ? kWalkDown : kWalkQkv;
    const int pairs = static_cast<int>(first_[i].bytes() / 4);
    StoreEntries<<<(pairs + kThreads - 1) / kThreads, kThreads>>>(
        static_cast<const uint32_t*>(first_[i].data()),
        static_cast<WalkEntry*>(results_[step].data()), pairs, 1);
    Check(cudaGetLastError(), "StoreEntries");
  }
}

unsigned long long WalkModel::Error() const {
  unsigned long long error = 0;
  Check(cudaMemcpy(&error, error_.data(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return error;
}

double WalkModel::StepErrorOverBound(int layer, int step, bool continues) {
  // What a step before has left, in the layer or before the first.
  const auto rows_of = [&](int before, int of_layer) {
    if (of_layer < 0) {
      if (!continues) return static_cast<const T*>(first_[before == kWalkQkv].data());
      return static_cast<const T*>(nullptr);  // see ErrorOverBound
    }
    return static_cast<const T*>(traces_[before].data()) + of_layer * TraceCount(before);
  };
  const int before = (step + kWalkSteps - 1) % kWalkSteps;
  const T* lhs = rows_of(before, step == kWalkOut ? layer - 1 : layer);
  const T* residual = step == kWalkOut    ? rows_of(kWalkDown, layer - 1)
                      : step == kWalkDown ? rows_of(kWalkOut, layer)
                                          : nullptr;
  int64_t stride = shape_.n(before);
  const int k = shape_.k(step), n = shape_.n(step);
  if (step == kWalkGateUp || step == kWalkQkv) {
    const T* scale =
        static_cast<const T*>(norms_[step == kWalkQkv].data()) + int64_t{layer} * shape_.width;
    auto* out = static_cast<T*>(normalized_.data());
    NormalizeRow<<<shape_.rows, kThreads>>>(lhs, stride, scale, out, k);
    Check(cudaGetLastError(), "NormalizeRow");
    lhs = out;
    stride = k;
  }
  const int64_t elements = int64_t{n} * k, at = layer * elements * shape_.weights(step);
  const auto weight_from = [&](int64_t first) {
    return Weight{static_cast<const uint32_t*>(packed_[step].data()) + first / 8,
                  static_cast<const T*>(scales_[step].data()) + first / kGroup, k};
  };
  const Weight up = step == kWalkGateUp ? weight_from(at + elements) : Weight{};
  const int64_t warps = int64_t{shape_.rows} * n;
  Check(cudaMemset(worst_.data(), 0, 8), "cudaMemset");
  CompareStep<<<static_cast<unsigned>((warps * 32 + kThreads - 1) / kThreads), kThreads>>>(
      weight_from(at), up, lhs, stride, residual,
      static_cast<const T*>(traces_[step].data()) + layer * TraceCount(step), shape_.rows, n,
      static_cast<unsigned long long*>(worst_.data()));
  Check(cudaGetLastError(), "CompareStep");
  double ratio = 0;
  Check(cudaMemcpy(&ratio, worst_.data(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return ratio;
}

double WalkModel::ErrorOverBound(bool continues) {
  double worst = 0;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int step = 0; step < kWalkSteps; ++step) {
      // The trace of the launch before is overwritten, so the first step cannot be computed again.
      if (continues && layer == 0 && step == kWalkOut) continue;
      worst = std::fmax(worst, StepErrorOverBound(layer, step, continues));
    }
  }
  return worst;
}

uint64_t WalkModel::Digest() const {
  DeviceBuffer digest(8);
  Check(cudaMemset(digest.data(), 0, 8), "cudaMemset");
  for (const auto& trace : traces_) {
    AddDigest<<<256, kThreads>>>(static_cast<const uint16_t*>(trace.data()), trace.bytes() / 2,
                                 static_cast<unsigned long long*>(digest.data()));
    Check(cudaGetLastError(), "AddDigest");
  }
  uint64_t sum = 0;
  Check(cudaMemcpy(&sum, digest.data(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return sum;
}

}  // namespace jaxlowbit::check
