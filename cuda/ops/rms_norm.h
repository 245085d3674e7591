// SPDX-License-Identifier: Apache-2.0
//
// Adds a residual and normalizes rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gpu.h"
#include "cuda/ops/exchange.h"
#include "cuda/types.h"

namespace jaxlowbit {

// For each row, sum = x + addend, both rounded, and with scales out = sum / sqrt(mean(sum^2) + epsilon) * scale. All
// buffers but scales and addend have `type`; columns is a multiple of 8 up to kMaxRmsNormColumns (limits.h). If out has
// 8 bits, rows of `type` are rounded once more, as quantize_rows.h has it; columns is a multiple of 16.
struct RmsNorm {
  ElementType type;
  ElementType scale_type, addend_type;  // `type` or float32
  int64_t rows, columns;
  const void *x, *addend, *scale;  // scale: null for none
  void *sum, *out;
  float epsilon;
  // Of several devices: the addend is a part, float32, of which each has one for these rows, up to kMaxExchangeRows.
  Exchange exchange = {};
  ElementType out_type = type;  // `type`, kInt8 or kE4m3
  float* out_scale = nullptr;   // [rows], of an out of 8 bits
};

cudaError_t PrepareRmsNorm();

// Enqueues the normalization, under PDL if the device has it.
cudaError_t LaunchRmsNorm(const RmsNorm& norm, const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
