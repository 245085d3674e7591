// SPDX-License-Identifier: Apache-2.0
//
// reduce_splits: out[i, n] = epilogue(sum over s of workspace[s, i, n]), in order of s: the float32 partial sums of
// split-K. Rows of the workspace are padded to whole atoms; gated rows contain the gate, then up.
//
// Bound: reads 4 * split_k bytes per output, mostly from L2.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/pdl.cuh"
#include "cuda/kernels/epilogue.cuh"
#include "cuda/kernels/launch_config.h"
#include "cuda/kernels/params.h"
#include "cuda/limits.h"
#include "cuda/ops/reduce_splits.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 128;

// Loads all partial sums first, to overlap their latencies, then adds them in order.
__device__ float SumOf(const float* first, int64_t step, int split_k) {
  float partial[kMaxSplitK];
#pragma unroll
  for (int split = 0; split < kMaxSplitK; ++split) {
    partial[split] = split < split_k ? first[split * step] : 0.0f;
  }
  float sum = partial[0];
#pragma unroll
  for (int split = 1; split < kMaxSplitK; ++split) sum += partial[split];
  return sum;
}

// T: type of lhs; Out: type of out. `m`: rows per batch element.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    ReduceSplitsKernel(const float* workspace, Out* out, int64_t rows, int64_t m, int64_t n,
                       int64_t n_padded, int split_k, EpilogueParams e, UnitParams units) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / n_padded, column = i % n_padded;
  if (row >= rows || column >= n) return;
  // Position of the weight. Divided here, since a later division, a function call, would spill the partial sums.
  const int64_t product = !e.any ? 0 : e.gated ? row / m * 2 : row / m;
  WaitForPreviousKernels();
  const int64_t row_size = e.gated ? 2 * n_padded : n_padded;
  const float* first = workspace + row * row_size + column;
  float value[1] = {SumOf(first, rows * row_size, split_k)};
  if (e.any) {
    const float residual[1] = {LoadResidual<T>(e, row * n + column)};
    value[0] =
        fmaf(value[0], LoadUnit(units, product, n, column), LoadBias<T>(e, product, n, column));
    float up[1] = {};
    if (e.gated) {
      up[0] = fmaf(SumOf(first + n_padded, rows * row_size, split_k),
                   LoadUnit(units, product + 1, n, column), LoadBias<T>(e, product + 1, n, column));
    }
    Finish(e, up, residual, value);
  }
  out[row * n + column] = Out(value[0]);
}

template <typename T, typename Out>
cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, int split_k,
                   const Device& device, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t n_padded = CeilDiv(problem.out_columns(), kAtom) * kAtom;
  const LaunchConfig launch(CeilDiv(rows * n_padded, kThreads), kThreads, 0, stream,
                            device.compute_capability >= 90);
  EpilogueParams epilogue = EpilogueOf(problem, buffers);
  epilogue.bias = buffers.bias;
  epilogue.residual = buffers.residual;
  UnitParams units = UnitsOf(problem);
  units.data = buffers.unit;
  units.index = buffers.index;
  return cudaLaunchKernelEx(&launch.config, ReduceSplitsKernel<T, Out>,
                            static_cast<const float*>(buffers.workspace),
                            static_cast<Out*>(buffers.out), rows, problem.m, problem.out_columns(),
                            n_padded, split_k, epilogue, units);
}

}  // namespace

cudaError_t PrepareReduceSplits() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(ReduceSplitsKernel<__nv_bfloat16, float>),
        reinterpret_cast<const void*>(ReduceSplitsKernel<__nv_bfloat16, __nv_bfloat16>),
        reinterpret_cast<const void*>(ReduceSplitsKernel<__half, float>),
        reinterpret_cast<const void*>(ReduceSplitsKernel<__half, __half>)}) {
    const cudaError_t error = Load(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchReduceSplits(const QuantizedMatmul& problem, const Buffers& buffers, int split_k,
                               const Device& device, cudaStream_t stream) {
  const bool out_float = problem.out == ElementType::kF32;
  const auto launch =
      problem.lhs == ElementType::kBf16
          ? (out_float ? Launch<__nv_bfloat16, float> : Launch<__nv_bfloat16, __nv_bfloat16>)
          : (out_float ? Launch<__half, float> : Launch<__half, __half>);
  return launch(problem, buffers, split_k, device, stream);
}

}  // namespace jaxlowbit
