// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90_stream {

// Loads an instance on the current device.
cudaError_t Load(const void* function);

// Enqueues one product, or `count` products as one launch; `problem` is then the result of Join (select.h).
cudaError_t Launch(const QuantizedMatmul& problem, const Operands* products, size_t count,
                   const Choice& choice, const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit::sm90_stream
