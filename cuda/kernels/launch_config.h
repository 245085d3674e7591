// SPDX-License-Identifier: Apache-2.0
//
// Loads and launches kernels. cudaLaunchKernelEx returns the error of this launch only; cudaGetLastError could return
// the error of an earlier, unrelated call.
//
// Programmatic dependent launch (PDL): a kernel launched with the attribute may start while the previous kernel in the
// stream still runs, until WaitForPreviousKernels (device/pdl.cuh). A kernel launched this way
// waits in every CTA that has work. So kernels end in launch order, and after the wait a kernel may read and overwrite
// the data of all earlier ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxlowbit {

// Loads the kernel: reading its attributes forces lazy loading.
inline cudaError_t Load(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// Loads the kernel and allows up to `bytes` of dynamic shared memory per CTA.
inline cudaError_t AllowSharedMemory(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Loads the kernel and sets its carveout to maximum shared memory. By default an idle SM sizes shared memory for the
// kernel that starts on it, and a CTA of the next (PDL) kernel waits if it does not fit next to that one. So every
// kernel that may be overlapped requests the maximum.
inline cudaError_t PreferSharedMemory(const void* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

struct LaunchConfig {
  // The selection has checked the limits of all sizes. `pdl` needs compute capability 9.0. `cluster_ctas`: 0 for a
  // launch without clusters.
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

// Launches a kernel whose only parameter is a `Params`.
template <typename Params>
cudaError_t LaunchFunction(const LaunchConfig& launch, const void* function, Params* params) {
  void* arguments[] = {params};
  return cudaLaunchKernelExC(&launch.config, function, arguments);
}

}  // namespace jaxlowbit
