// SPDX-License-Identifier: Apache-2.0
//
// reduce_splits: out[i, n] = sum over s of workspace[s, i, n], s in order, for the float32 partial
// sums that a kernel left when it split k. Rows of the workspace are padded to whole atoms.
//
// Bound. 4 * split_k bytes read per output, most of them from L2, where the kernel before left
// them.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/dependency.cuh"
#include "cuda/early_start.h"
#include "cuda/kernels.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    ReduceSplitsKernel(const float* workspace, T* out, int64_t rows, int64_t n, int64_t n_padded,
                       int split_k) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / n_padded, column = i % n_padded;
  if (row >= rows || column >= n) return;
  WaitForPreviousKernels();
  // All loads first, so that one latency covers them; then the sum, in order.
  float parts[kMaxSplitK];
#pragma unroll
  for (int split = 0; split < kMaxSplitK; ++split) {
    parts[split] = split < split_k ? workspace[split * rows * n_padded + i] : 0.0f;
  }
  float sum = parts[0];
#pragma unroll
  for (int split = 1; split < kMaxSplitK; ++split) sum += parts[split];
  out[row * n + column] = T(sum);
}

template <typename T>
cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, int split_k,
                   const Device& device, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t n_padded = CeilDiv(problem.out_columns(), kAtom) * kAtom;
  cudaLaunchAttribute early_start = EarlyStart();
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(CeilDiv(rows * n_padded, kThreads));
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &early_start;
  config.numAttrs = device.compute_capability >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(
      &config, ReduceSplitsKernel<T>, static_cast<const float*>(buffers.workspace),
      static_cast<T*>(buffers.out), rows, problem.out_columns(), n_padded, split_k);
}

}  // namespace

cudaError_t InitializeReduceSplits() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const void* kernel : {reinterpret_cast<const void*>(ReduceSplitsKernel<float>),
                             reinterpret_cast<const void*>(ReduceSplitsKernel<__nv_bfloat16>),
                             reinterpret_cast<const void*>(ReduceSplitsKernel<__half>)}) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchReduceSplits(const QuantizedMatmul& problem, const Buffers& buffers, int split_k,
                               const Device& device, cudaStream_t stream) {
  switch (problem.out) {
    case ElementType::kF32:
      return Launch<float>(problem, buffers, split_k, device, stream);
    case ElementType::kBf16:
      return Launch<__nv_bfloat16>(problem, buffers, split_k, device, stream);
    case ElementType::kF16:
      return Launch<__half>(problem, buffers, split_k, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxlowbit
