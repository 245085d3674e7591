// SPDX-License-Identifier: Apache-2.0
//
// rms_norm: sum = x + addend, out = sum / sqrt(mean(sum^2) + epsilon) * scale, for each row; between
// the products of a transformer's block.
//
// Bound. The latency of one row: from the end of the kernel before to the start of the next product,
// whose weights are on their way meanwhile. So a row is one CTA, kept in registers, and scales are
// there before the wait.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device/dependency.cuh"
#include "cuda/early_start.h"
#include "cuda/kernels.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kElements = 8;  // of a vector of 16 bytes
constexpr int kMaxVectors = static_cast<int>(kMaxRmsNormColumns) / (kMaxThreads * kElements);
static_assert(kMaxVectors == 2);

template <typename T>
struct alignas(16) Vector {
  T at[kElements];
};

template <typename T>
__device__ const Vector<T>& At(const T* pointer, int64_t vector) {
  return reinterpret_cast<const Vector<T>*>(pointer)[vector];
}
template <typename T>
__device__ Vector<T>& At(T* pointer, int64_t vector) {
  return reinterpret_cast<Vector<T>*>(pointer)[vector];
}

// Of all threads.
__device__ float SumOfBlock(float value) {
  __shared__ float sums[kMaxThreads / 32];
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0;
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  return value;
}

// kVectors: of a thread.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    RmsNormKernel(const T* x, const T* addend, const T* scale, T* sum, T* out, int vectors,
                  float epsilon) {
  using V = Vector<T>;
  LaunchDependents();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * vectors;
  V scales[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (scale != nullptr && at < vectors) scales[i] = At(scale, at);
  }
  WaitForPreviousKernels();
  V sums[kVectors];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at >= vectors) break;
    const V a = At(x, row + at), b = At(addend, row + at);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      sums[i].at[j] = T(static_cast<float>(a.at[j]) + static_cast<float>(b.at[j]));
      squares += static_cast<float>(sums[i].at[j]) * static_cast<float>(sums[i].at[j]);
    }
    At(sum, row + at) = sums[i];
  }
  if (scale == nullptr) return;
  const float mean = SumOfBlock(squares) / static_cast<float>(vectors * kElements);
  const float factor = rsqrtf(mean + epsilon);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at >= vectors) break;
    V result;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      result.at[j] =
          T(static_cast<float>(sums[i].at[j]) * factor * static_cast<float>(scales[i].at[j]));
    }
    At(out, row + at) = result;
  }
}

template <typename T>
cudaError_t Launch(const RmsNorm& norm, const cudaLaunchAttribute* early_start,
                   cudaStream_t stream) {
  const int vectors = static_cast<int>(norm.columns / kElements);
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(norm.rows);
  config.blockDim =
      static_cast<unsigned>(std::min<int64_t>(kMaxThreads, CeilDiv(vectors, 32) * 32));
  config.stream = stream;
  config.attrs = const_cast<cudaLaunchAttribute*>(early_start);
  config.numAttrs = early_start == nullptr ? 0 : 1;
  const auto kernel = vectors <= kMaxThreads ? RmsNormKernel<T, 1> : RmsNormKernel<T, kMaxVectors>;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const T*>(norm.x),
                            static_cast<const T*>(norm.addend), static_cast<const T*>(norm.scale),
                            static_cast<T*>(norm.sum), static_cast<T*>(norm.out), vectors,
                            norm.epsilon);
}

}  // namespace

cudaError_t InitializeRmsNorm() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(RmsNormKernel<__nv_bfloat16, 1>),
        reinterpret_cast<const void*>(RmsNormKernel<__nv_bfloat16, kMaxVectors>),
        reinterpret_cast<const void*>(RmsNormKernel<__half, 1>),
        reinterpret_cast<const void*>(RmsNormKernel<__half, kMaxVectors>)}) {
    const cudaError_t error = PreferSharedMemory(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchRmsNorm(const RmsNorm& norm, int device, cudaStream_t stream) {
  if (norm.rows == 0) return cudaSuccess;
  const cudaLaunchAttribute attribute = EarlyStart();
  const bool early = DeviceInfo(device).compute_capability >= 90;
  const auto launch = norm.type == ElementType::kBf16 ? Launch<__nv_bfloat16> : Launch<__half>;
  return launch(norm, early ? &attribute : nullptr, stream);
}

}  // namespace jaxlowbit
