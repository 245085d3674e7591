// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gpu.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90 {

// Loads an instance on the current device.
cudaError_t Load(const InstanceKey& key, const void* function);

// Queries the number of resident clusters of the current device, and prepares state shared by all launches.
cudaError_t Prepare(Device& device);

// Enqueues the product and, with split_k > 1, the kernel that reduces the stream-K tail.
cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                   const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit::sm90
