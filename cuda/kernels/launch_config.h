// SPDX-License-Identifier: Apache-2.0
//
// How a kernel is loaded and launched. cudaLaunchKernelEx returns the error of its own launch, whereas
// cudaGetLastError would also return what an earlier call of anybody's left behind.
//
// Programmatic dependent launch (PDL): a kernel launched with the attribute may start while the previous kernel in the
// stream still runs, and waits for it where its code says so (device/pdl.cuh). The previous kernel, if it was
// launched so itself, has waited for the one before it in every CTA that goes on. So kernels end in the order of
// their launches, and a kernel that has waited can read what any of them wrote, and write what any of them read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxlowbit {

// Asking for a kernel's attributes loads it.
inline cudaError_t Load(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// Loads the kernel and lets its CTAs have up to `bytes` of dynamic shared memory.
inline cudaError_t AllowSharedMemory(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// A multiprocessor divides its memory into L1 and shared memory for the kernel that finds it empty, by default so
// that this kernel fits, and a CTA of the next kernel waits if there is no room beside it. So each kernel that others
// may overlap asks for all shared memory there is. Loads the kernel.
inline cudaError_t PreferSharedMemory(const void* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

struct LaunchConfig {
  // Sizes must be within the limits that the selection checks. `pdl` needs compute capability 9.0. The launch has
  // clusters if `cluster_ctas` is not 0.
  LaunchConfig(int64_t ctas, int threads, int64_t shared_bytes, cudaStream_t stream,
               bool pdl = false, int cluster_ctas = 0)
      : LaunchConfig(dim3(static_cast<unsigned>(ctas)), threads, shared_bytes, stream, pdl,
                     cluster_ctas) {}

  LaunchConfig(dim3 grid, int threads, int64_t shared_bytes, cudaStream_t stream, bool pdl = false,
               int cluster_ctas = 0) {
    config.gridDim = grid;
    config.blockDim = static_cast<unsigned>(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    if (cluster_ctas > 0) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(cluster_ctas), 1, 1};
    }
    if (pdl) {
      cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
  }

  LaunchConfig(const LaunchConfig&) = delete;  // config points into attributes
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
};

// Launches a kernel of one parameter, which must have that type.
template <typename Params>
cudaError_t LaunchFunction(const LaunchConfig& launch, const void* function, Params* params) {
  void* arguments[] = {params};
  return cudaLaunchKernelExC(&launch.config, function, arguments);
}

}  // namespace jaxlowbit
