// SPDX-License-Identifier: Apache-2.0
//
// gather_lhs: gathered[row, c] = lhs[row, permutation[c]], for weights whose rows are stored in a permuted order. Runs
// before the product, which loads its weights meanwhile. The permutation does not depend on the previous kernel, so
// each thread loads its part before the PDL wait and reuses it for all rows.
//
// GatherColumnsKernel is for small lhs. Bound: latency of one load and one store. GatherRowsKernel is for large lhs.
// Bound: memory. Copies whole rows to shared memory and gathers there; gathering from global memory would need one
// transaction per 2 bytes.

#include <algorithm>

#include "cuda/device/copy.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/permutation.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/gather_lhs.h"

namespace jaxlowbit {
namespace {

constexpr int kElements = 8;  // per 16-byte vector
constexpr int64_t kMaxColumnsKernelElements =
    1 << 18;  // maximum elements of lhs for GatherColumnsKernel

constexpr int kColumnThreads = 128;
constexpr int kColumnCtasPerSm = 8;

constexpr int kRowThreads = 512;
constexpr int kRowCtasPerSm = 2;
constexpr int kRowBuffers = 2;        // one is read while the next row is loaded
constexpr int kMaxThreadVectors = 8;  // per thread

// kCount: elements per vector, a divisor of k. `part`: columns of a permuted part.
template <int kCount>
__global__ void __launch_bounds__(kColumnThreads)
    GatherColumnsKernel(const uint16_t* lhs, const int32_t* permutation, uint16_t* gathered,
                        int64_t rows, int k, int part) {
  LaunchDependents();
  const int vector = blockIdx.x * kColumnThreads + threadIdx.x;
  if (vector >= k / kCount) return;
  int columns[kCount];
  LoadColumns(permutation, vector * kCount, part, columns);
  WaitForPreviousKernels();  // they may have written lhs
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Vector<uint16_t, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.at[i] = lhs[row * k + columns[i]];
    reinterpret_cast<Vector<uint16_t, kCount>*>(gathered + row * k)[vector] = values;
  }
}

// kVectors: vectors per thread. Requires k % kElements == 0.
template <int kVectors>
__global__ void __launch_bounds__(kRowThreads)
    GatherRowsKernel(const uint16_t* lhs, const int32_t* permutation, uint16_t* gathered,
                     int64_t rows, int k, int part) {
  extern __shared__ __align__(kCopyBytes) uint16_t buffers[];  // [kRowBuffers, k]
  LaunchDependents();
  const int vectors = k / kElements;
  const int first = blockIdx.x * kVectors * kRowThreads + threadIdx.x;
  int columns[kVectors][kElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int vector = first + v * kRowThreads;
    if (vector < vectors) LoadColumns(permutation, vector * kElements, part, columns[v]);
  }
  WaitForPreviousKernels();
  const auto copy = [&](int64_t row, int buffer) {
    if (row < rows) {
      const uint32_t to = SharedAddress(buffers + buffer * k);
      const uint16_t* from = lhs + row * k;
      for (int i = threadIdx.x; i < vectors; i += kRowThreads) {
        CopyAsync(to + i * kCopyBytes, from + i * kElements, true);
      }
    }
    CommitCopies();
  };
  int buffer = 0;
  copy(blockIdx.y, buffer);
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    copy(row + gridDim.y, buffer ^ 1);
    WaitCopies<1>();
    __syncthreads();  // the row has arrived
    const uint16_t* from = buffers + buffer * k;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = first + v * kRowThreads;
      if (vector >= vectors) break;
      Vector<uint16_t, kElements> values;
#pragma unroll
      for (int i = 0; i < kElements; ++i) values.at[i] = from[columns[v][i]];
      reinterpret_cast<Vector<uint16_t, kElements>*>(gathered + row * k)[vector] = values;
    }
    __syncthreads();  // the row has been read
    buffer ^= 1;
  }
}

using KernelFunction = decltype(&GatherRowsKernel<1>);

KernelFunction FindRows(int vectors) {
  return vectors == 1   ? GatherRowsKernel<1>
         : vectors == 2 ? GatherRowsKernel<2>
         : vectors == 4 ? GatherRowsKernel<4>
                        : GatherRowsKernel<kMaxThreadVectors>;
}

int MaxSharedBytes(const Device& device) {
  return device.shared_bytes_per_sm - kReservedSharedBytes;
}

int64_t RowBytes(const QuantizedMatmul& problem) { return kRowBuffers * problem.k * 2; }

cudaError_t Launch(const LaunchConfig& launch, KernelFunction kernel,
                   const QuantizedMatmul& problem, const Buffers& buffers) {
  return cudaLaunchKernelEx(&launch.config, kernel, static_cast<const uint16_t*>(buffers.lhs),
                            buffers.permutation, static_cast<uint16_t*>(buffers.gathered),
                            problem.batch * problem.m, static_cast<int>(problem.k),
                            static_cast<int>(problem.k / problem.permuted_parts));
}

// Here and below, launched without PDL: a kernel before the call may have written the permutation, or the weights,
// which the product loads without waiting.
template <int kCount>
cudaError_t LaunchColumns(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Device& device, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t ctas_per_row = CeilDiv(problem.k / kCount, kColumnThreads);
  const int64_t max_ctas = CeilDiv(device.num_sms * kColumnCtasPerSm, ctas_per_row);  // below 65536
  const dim3 grid(static_cast<unsigned>(ctas_per_row),
                  static_cast<unsigned>(std::min(rows, max_ctas)));
  const LaunchConfig launch(grid, kColumnThreads, 0, stream);
  return Launch(launch, GatherColumnsKernel<kCount>, problem, buffers);
}

// A CTA reads whole rows but gathers only some of their columns if there are too few rows for all SMs.
cudaError_t LaunchRows(const QuantizedMatmul& problem, const Buffers& buffers, const Device& device,
                       cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t ctas = device.num_sms * kRowCtasPerSm;
  int vectors = 1;
  const auto ctas_per_row = [&] { return CeilDiv(problem.k / kElements, vectors * kRowThreads); };
  while (vectors < kMaxThreadVectors && ctas_per_row() > 1 && ctas_per_row() * rows > ctas)
    vectors *= 2;
  const dim3 grid(static_cast<unsigned>(ctas_per_row()),
                  static_cast<unsigned>(std::min(rows, CeilDiv(ctas, ctas_per_row()))));
  const LaunchConfig launch(grid, kRowThreads, RowBytes(problem), stream);
  return Launch(launch, FindRows(vectors), problem, buffers);
}

}  // namespace

cudaError_t PrepareGatherLhs(const Device& device) {
  for (const void* kernel : {reinterpret_cast<const void*>(GatherColumnsKernel<1>),
                             reinterpret_cast<const void*>(GatherColumnsKernel<kElements>)}) {
    const cudaError_t error = PreferSharedMemory(kernel);
    if (error != cudaSuccess) return error;
  }
  for (int vectors : {1, 2, 4, kMaxThreadVectors}) {
    const void* kernel = reinterpret_cast<const void*>(FindRows(vectors));
    cudaError_t error = PreferSharedMemory(kernel);
    if (error == cudaSuccess) {
      error = AllowSharedMemory(kernel, MaxSharedBytes(device));
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchGatherLhs(const QuantizedMatmul& problem, const Buffers& buffers,
                            const Device& device, cudaStream_t stream) {
  const bool vectors = problem.k % kElements == 0 && IsAligned(buffers.permutation);
  const bool small =
      problem.batch * problem.m * problem.k <= kMaxColumnsKernelElements || !IsAligned(buffers.lhs);
  const auto launch = !vectors ? LaunchColumns<1>
                      : small || RowBytes(problem) > MaxSharedBytes(device)
                          ? LaunchColumns<kElements>
                          : LaunchRows;
  return launch(problem, buffers, device, stream);
}

}  // namespace jaxlowbit
