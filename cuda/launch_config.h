// SPDX-License-Identifier: Apache-2.0
//
// How a kernel is launched. cudaLaunchKernelEx returns the error of its own launch, where cudaGetLastError would
// also return what an earlier call of anybody's left behind.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/early_start.h"

namespace jaxlowbit {

struct LaunchConfig {
  // Sizes are those that the kernel's limits allow (dispatch.h). Of clusters where `cluster_ctas` is not 0.
  LaunchConfig(int64_t ctas, int threads, int64_t shared_bytes, cudaStream_t stream,
               bool early_start = false, int cluster_ctas = 0)
      : LaunchConfig(dim3(static_cast<unsigned>(ctas)), threads, shared_bytes, stream, early_start,
                     cluster_ctas) {}

  LaunchConfig(dim3 grid, int threads, int64_t shared_bytes, cudaStream_t stream,
               bool early_start = false, int cluster_ctas = 0) {
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
    if (early_start) attributes[config.numAttrs++] = EarlyStart();
  }

  LaunchConfig(const LaunchConfig&) = delete;  // config points into attributes
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
};

}  // namespace jaxlowbit
