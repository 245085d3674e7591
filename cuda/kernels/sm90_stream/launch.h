// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/kernels/kernel_launch.h"

namespace jaxlowbit::sm90_stream {

// Loads an instance on the current device.
cudaError_t Load(const void* function);

// LoadLaunch, of one product or of several.
cudaError_t Load(const PlannedStep& step, const Device& device,
                 std::unique_ptr<const KernelLaunch>* launch);

}  // namespace jaxlowbit::sm90_stream
