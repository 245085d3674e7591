// SPDX-License-Identifier: Apache-2.0
//
// Copies device memory with a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxlowbit {

cudaError_t PrepareCopy();

// Enqueues a copy of `bytes` between buffers of any alignment that do not overlap.
cudaError_t LaunchCopy(const void* from, void* to, int64_t bytes, cudaStream_t stream);

}  // namespace jaxlowbit
