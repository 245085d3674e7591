// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/kernel_launch.h"

namespace jaxlowbit::sm90 {

// Loads an instance on the current device.
cudaError_t Load(const InstanceKey& key, const void* function);

// Queries the number of resident clusters of the current device, and prepares state shared by all launches.
cudaError_t Prepare(Device& device);

// LoadLaunch. With split_k > 1, a second kernel reduces the stream-K tail.
cudaError_t Load(const PlannedStep& step, const Device& device,
                 std::unique_ptr<const KernelLaunch>* launch);

}  // namespace jaxlowbit::sm90
