// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "cuda/kernels/launch_config.h"
#include "cuda/ops/copy.h"
#include "cuda/types.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxCtas = 4096;

// Bound: memory; for small copies, the launch.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) CopyKernel(const Unit* from, Unit* to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    to[i] = from[i];
  }
}

template <typename Unit>
cudaError_t Launch(const void* from, void* to, int64_t bytes, cudaStream_t stream) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Unit));
  const LaunchConfig launch(std::min(CeilDiv(count, kThreads), kMaxCtas), kThreads, 0, stream);
  return cudaLaunchKernelEx(&launch.config, CopyKernel<Unit>, static_cast<const Unit*>(from),
                            static_cast<Unit*>(to), count);
}

}  // namespace

cudaError_t PrepareCopy() {
  for (const void* kernel : {reinterpret_cast<const void*>(CopyKernel<uint4>),
                             reinterpret_cast<const void*>(CopyKernel<uint32_t>),
                             reinterpret_cast<const void*>(CopyKernel<uint16_t>),
                             reinterpret_cast<const void*>(CopyKernel<uint8_t>)}) {
    const cudaError_t error = Load(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCopy(const void* from, void* to, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                    static_cast<uintptr_t>(bytes);
  const auto launch = bits % 16 == 0  ? Launch<uint4>
                      : bits % 4 == 0 ? Launch<uint32_t>
                      : bits % 2 == 0 ? Launch<uint16_t>
                                      : Launch<uint8_t>;
  return launch(from, to, bytes, stream);
}

}  // namespace jaxlowbit
