// SPDX-License-Identifier: Apache-2.0
//
// Launches qmm_sm80, and qmm_sm80_transposed for transposed problems: they share their geometry and parameters.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/kernels/kernel_launch.h"

namespace jaxlowbit::sm80 {

// Loads an instance of either kernel on the current device.
cudaError_t Load(const void* function);

// LoadLaunch. With split_k > 1, a second kernel adds the partial sums.
cudaError_t Load(const PlannedStep& step, const Device& device,
                 std::unique_ptr<const KernelLaunch>* launch);

}  // namespace jaxlowbit::sm80
