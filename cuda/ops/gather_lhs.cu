// SPDX-License-Identifier: Apache-2.0
//
// gather_lhs: gathered[row, c] = lhs[row, permutation[c]], for weights whose rows are stored in a permuted order. It
// runs in front of the product, whose weights are loaded meanwhile. The permutation does not depend on the previous
// kernel, so each thread loads that of its columns before the wait, and keeps it for all its rows.
//
// GatherColumnsKernel takes few elements. Bound: latency, of an element of lhs and of a store.
// GatherRowsKernel takes more. Bound: memory, so rows are read whole, to shared memory, and columns are looked up
// there: from global memory that would be a transaction for every 2 bytes.

#include <algorithm>

#include "cuda/device/copy.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/permutation.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/gather_lhs.h"

namespace jaxlowbit {
namespace {

constexpr int kElements = 8;               // of a vector, which is stored as 16 bytes
constexpr int64_t kFewElements = 1 << 18;  // the most of lhs for GatherColumnsKernel

constexpr int kColumnThreads = 128;
constexpr int kColumnCtasPerSm = 8;

constexpr int kRowThreads = 512;
constexpr int kRowCtasPerSm = 2;
constexpr int kRowBuffers = 2;   // one is read while the next row is loaded
constexpr int kMostVectors = 8;  // of a thread

// kCount: elements of a vector; it divides k, so that rows begin with a vector. `part`: columns of a permuted part.
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

// kVectors: vectors of a thread; k is a multiple of a vector's elements.
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
    __syncthreads();  // all of the row is there
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
    __syncthreads();  // and has been read
    buffer ^= 1;
  }
}

using KernelFunction = decltype(&GatherRowsKernel<1>);

KernelFunction FindRows(int vectors) {
  return vectors == 1   ? GatherRowsKernel<1>
         : vectors == 2 ? GatherRowsKernel<2>
         : vectors == 4 ? GatherRowsKernel<4>
                        : GatherRowsKernel<kMostVectors>;
}

int MostSharedBytes(const Device& device) {
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

// Launches without PDL, here and below: a kernel before the call may have written the permutation, or the weights that
// the product, under PDL, does not wait for.
template <int kCount>
cudaError_t LaunchColumns(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Device& device, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t ctas_per_row = CeilDiv(problem.k / kCount, kColumnThreads);
  const int64_t most = CeilDiv(device.num_sms * kColumnCtasPerSm, ctas_per_row);  // below 65536
  const dim3 grid(static_cast<unsigned>(ctas_per_row), static_cast<unsigned>(std::min(rows, most)));
  const LaunchConfig launch(grid, kColumnThreads, 0, stream);
  return Launch(launch, GatherColumnsKernel<kCount>, problem, buffers);
}

// A CTA reads whole rows, so it gathers as many of their columns as leave work for all multiprocessors.
cudaError_t LaunchRows(const QuantizedMatmul& problem, const Buffers& buffers, const Device& device,
                       cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.m;
  const int64_t ctas = device.num_sms * kRowCtasPerSm;
  int vectors = 1;
  const auto ctas_per_row = [&] { return CeilDiv(problem.k / kElements, vectors * kRowThreads); };
  while (vectors < kMostVectors && ctas_per_row() > 1 && ctas_per_row() * rows > ctas) vectors *= 2;
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
  for (int vectors : {1, 2, 4, kMostVectors}) {
    const void* kernel = reinterpret_cast<const void*>(FindRows(vectors));
    cudaError_t error = PreferSharedMemory(kernel);
    if (error == cudaSuccess) {
      error = AllowSharedMemory(kernel, MostSharedBytes(device));
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchGatherLhs(const QuantizedMatmul& problem, const Buffers& buffers,
                            const Device& device, cudaStream_t stream) {
  const bool vectors = problem.k % kElements == 0 && IsAligned(buffers.permutation);
  const bool few = problem.batch * problem.m * problem.k <= kFewElements || !IsAligned(buffers.lhs);
  const auto launch = !vectors ? LaunchColumns<1>
                      : few || RowBytes(problem) > MostSharedBytes(device)
                          ? LaunchColumns<kElements>
                          : LaunchRows;
  return launch(problem, buffers, device, stream);
}

}  // namespace jaxlowbit
