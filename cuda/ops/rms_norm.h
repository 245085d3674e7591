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

// Per row: sum = x + addend, or addend without x, rounded to `type`; with a scale, out = sum / sqrt(mean(sum^2) +
// epsilon) * scale, rounded to `type`. An 8-bit out is quantized from that as in quantize_rows.h. Buffers have `type`
// except scale and addend. Requires columns % 8 == 0 (8-bit out: % 16) and columns <= kMaxRmsNormColumns.
struct RmsNorm {
  ElementType type;
  ElementType scale_type, addend_type;  // `type` or float32
  int64_t rows, columns;
  const void *x, *addend, *scale;  // x, scale: null for none
  void *sum, *out;
  float epsilon;
  // With several devices, addend is this device's float32 partial sum, for up to kMaxExchangeRows rows.
  Exchange exchange = {};
  // The product before sends the partial sums to all devices, and `addend` is not read. A kernel
  // since the last exchange holds the next one (PlannedStep::holds_next).
  bool sent = false;
  ElementType out_type = type;  // `type`, kInt8 or kE4m3
  float* out_scale = nullptr;   // [rows], with an 8-bit out
};

cudaError_t PrepareRmsNorm();

// Enqueues the normalization, under PDL if available.
cudaError_t LaunchRmsNorm(const RmsNorm& norm, const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
