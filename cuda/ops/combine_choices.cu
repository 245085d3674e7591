// SPDX-License-Identifier: Apache-2.0
//
// combine_choices: the weighted sum of the rows of a token. Choices without a row add nothing, whatever their weight.
//
// Bound: memory, 4 * top bytes per output; for few tokens, the latency of two loads and a store.

#include <algorithm>

#include "cuda/device/pdl.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/combine_choices.cuh"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 128;
constexpr int kVectorColumns = kAlignment / sizeof(float);
constexpr int kMaxCtasPerRow = 256;  // along the columns

// A CTA has a token; a thread kCount columns at a time, a divisor of p.columns.
template <typename Out, int kCount>
__global__ void __launch_bounds__(kThreads) CombineKernel(const CombineChoices p) {
  LaunchDependents();
  if (p.place != nullptr) WaitForPreviousKernels();  // experts and weights are older
  const LocalExperts local(p.experts, p.offset);
  const int64_t vectors = p.columns / kCount, first = int64_t{blockIdx.x} * p.top;
  for (int64_t vector = blockIdx.y * kThreads + threadIdx.x; vector < vectors;
       vector += gridDim.y * kThreads) {
    float sum[kCount] = {};
    for (int begin = 0; begin < p.top; begin += kTogether) {
      const ChoiceRows choices(p, local, first, begin);
      WaitForPreviousKernels();
      choices.Add(p.rows, vectors, vector, sum);
    }
    ColumnsOf<Out, kCount> out;
#pragma unroll
    for (int j = 0; j < kCount; ++j) out.at[j] = Out(sum[j]);
    reinterpret_cast<ColumnsOf<Out, kCount>*>(p.out)[blockIdx.x * vectors + vector] = out;
  }
}

template <typename Out>
cudaError_t Launch(const CombineChoices& combine, cudaStream_t stream) {
  const bool vectors =
      combine.columns % kVectorColumns == 0 && IsAligned(combine.rows) && IsAligned(combine.out);
  const int64_t per_row = CeilDiv(combine.columns / (vectors ? kVectorColumns : 1), kThreads);
  const dim3 grid(static_cast<unsigned>(combine.tokens),
                  static_cast<unsigned>(std::min<int64_t>(per_row, kMaxCtasPerRow)));
  const LaunchConfig launch(grid, kThreads, 0, stream, true);
  return cudaLaunchKernelEx(&launch.config,
                            vectors ? CombineKernel<Out, kVectorColumns> : CombineKernel<Out, 1>,
                            combine);
}

template <typename Out>
cudaError_t Prepare() {
  for (const void* kernel : {reinterpret_cast<const void*>(CombineKernel<Out, kVectorColumns>),
                             reinterpret_cast<const void*>(CombineKernel<Out, 1>)}) {
    const cudaError_t error = PreferSharedMemory(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t PrepareCombineChoices() {
  for (const auto prepare : {Prepare<float>, Prepare<__nv_bfloat16>, Prepare<__half>}) {
    const cudaError_t error = prepare();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCombineChoices(const CombineChoices& combine, cudaStream_t stream) {
  const auto launch = combine.out_type == ElementType::kF32    ? Launch<float>
                      : combine.out_type == ElementType::kBf16 ? Launch<__nv_bfloat16>
                                                               : Launch<__half>;
  return launch(combine, stream);
}

}  // namespace jaxlowbit
