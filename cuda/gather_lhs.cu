// SPDX-License-Identifier: Apache-2.0
//
// gather_lhs: gathered[row, c] = lhs[row, permutation[c]], for weights whose rows are stored in another
// order; in front of the product, whose weights are on their way meanwhile.
//
// Bound. For few rows, latency: an order, then elements of lhs, then a store. So a thread has 8 columns,
// whose order it loads before the wait and keeps for all its rows. For many rows, the 2-byte loads.

#include <algorithm>

#include "cuda/device/dependency.cuh"
#include "cuda/early_start.h"
#include "cuda/kernels.h"
#include "cuda/permutation.cuh"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 128;
constexpr int kCtasPerSm = 8;
constexpr int kElements = 8;  // of a vector, whose stores are of 16 bytes

// kCount: of a vector, which divides k, so that rows begin with one. `part`: rows of the weight, and
// columns of lhs, that have an order of their own.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    GatherLhsKernel(const uint16_t* lhs, const int32_t* permutation, uint16_t* gathered,
                    int64_t rows, int k, int part) {
  LaunchDependents();
  const int vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= k / kCount) return;
  int columns[kCount];
  LoadColumns(permutation, vector * kCount, part, columns);
  WaitForPreviousKernels();  // one of them may have written lhs
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Vector<uint16_t, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.at[i] = lhs[row * k + columns[i]];
    reinterpret_cast<Vector<uint16_t, kCount>*>(gathered + row * k)[vector] = values;
  }
}

// Not early: a kernel before the call may have written the permutation, or the weights that the
// product, starting early, does not wait for.
template <int kCount>
void Launch(const QuantizedMatmul& problem, const Buffers& buffers, const Device& device,
            cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t ctas_per_row = CeilDiv(problem.k / kCount, kThreads);
  const int64_t most = CeilDiv(device.num_sms * kCtasPerSm, ctas_per_row);  // below 65536
  const dim3 grid(static_cast<unsigned>(ctas_per_row), static_cast<unsigned>(std::min(rows, most)));
  GatherLhsKernel<kCount><<<grid, kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(buffers.lhs), buffers.permutation,
      static_cast<uint16_t*>(buffers.gathered), rows, static_cast<int>(problem.k),
      static_cast<int>(problem.k / problem.orders));
}

}  // namespace

cudaError_t InitializeGatherLhs() {
  for (const void* kernel : {reinterpret_cast<const void*>(GatherLhsKernel<1>),
                             reinterpret_cast<const void*>(GatherLhsKernel<kElements>)}) {
    const cudaError_t error = PreferSharedMemory(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchGatherLhs(const QuantizedMatmul& problem, const Buffers& buffers,
                            const Device& device, cudaStream_t stream) {
  const auto launch = problem.k % kElements == 0 ? Launch<kElements> : Launch<1>;
  launch(problem, buffers, device, stream);
  return cudaGetLastError();
}

}  // namespace jaxlowbit
