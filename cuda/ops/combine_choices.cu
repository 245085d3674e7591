// SPDX-License-Identifier: Apache-2.0
//
// combine_choices: the weighted sum of the rows of a token. Choices without a row add nothing, whatever their weight.
//
// Bound: memory, 4 * top bytes per output; for few tokens, the latency of two loads and a store.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device/pdl.cuh"
#include "cuda/device/schedule/local_experts.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/combine_choices.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 128;
constexpr int kVectorColumns = kAlignment / sizeof(float);
constexpr int kTogether = 8;         // choices whose rows are loaded before any is added
constexpr int kMaxCtasPerRow = 256;  // along the columns

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

// Loads from L2, as the expert of a choice below: this SM may have cached what earlier choices had at this address.
__device__ float LoadWeight(const CombineChoices& p, int64_t choice) {
  switch (p.weight_type) {
    case ElementType::kBf16:
      return __bfloat162float(__ldcg(static_cast<const __nv_bfloat16*>(p.weight) + choice));
    case ElementType::kF16:
      return __half2float(__ldcg(static_cast<const __half*>(p.weight) + choice));
    default:
      return __ldcg(static_cast<const float*>(p.weight) + choice);
  }
}

// The row of a choice; -1: none.
__device__ int RowOf(const CombineChoices& p, const LocalExperts& local, int64_t choice) {
  if (p.place != nullptr) return p.place[choice];
  return local.Position(__ldcg(p.expert + choice)) < p.experts ? static_cast<int>(choice) : -1;
}

// A CTA has a token; a thread kCount columns at a time, a divisor of p.columns.
template <typename Out, int kCount>
__global__ void __launch_bounds__(kThreads) CombineKernel(const CombineChoices p) {
  using Row = Vector<float, kCount>;
  LaunchDependents();
  if (p.place != nullptr) WaitForPreviousKernels();  // experts and weights are older
  const LocalExperts local(p.experts, p.offset);
  const int64_t vectors = p.columns / kCount, first = int64_t{blockIdx.x} * p.top;
  const Row* rows = reinterpret_cast<const Row*>(p.rows);
  for (int64_t vector = blockIdx.y * kThreads + threadIdx.x; vector < vectors;
       vector += gridDim.y * kThreads) {
    float sum[kCount] = {};
    for (int begin = 0; begin < p.top; begin += kTogether) {
      int place[kTogether];
      float weight[kTogether];
      Row row[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const bool valid = begin + i < p.top;
        place[i] = valid ? RowOf(p, local, first + begin + i) : -1;
        weight[i] = valid ? LoadWeight(p, first + begin + i) : 0;
      }
      WaitForPreviousKernels();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (place[i] >= 0) row[i] = rows[place[i] * vectors + vector];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (place[i] < 0) continue;
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] = fmaf(weight[i], row[i].at[j], sum[j]);
      }
    }
    Vector<Out, kCount> out;
#pragma unroll
    for (int j = 0; j < kCount; ++j) out.at[j] = Out(sum[j]);
    reinterpret_cast<Vector<Out, kCount>*>(p.out)[blockIdx.x * vectors + vector] = out;
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
