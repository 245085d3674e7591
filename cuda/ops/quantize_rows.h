// SPDX-License-Identifier: Apache-2.0
//
// Quantizes rows (tokens) to 8 bits for the following product.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Columns per interleaved block (Buffers in problem.h); rows of values are padded to a multiple.
inline constexpr int64_t kInterleavedColumns = 16;

struct QuantizeRows {
  ElementType from;  // kF32, kBf16 or kF16
  ElementType to;    // kInt8 or kE4m3
  int64_t rows, columns;
  const void* floats;   // [rows, columns]
  const float* factor;  // [columns], divides the columns first; null for none
  void* values;         // [rows, padded columns], interleaved; if `wide`, bfloat16 in column order
  float* scale;         // [rows]
  // Requires that the previous kernel in the stream belongs to the same call: a kernel before the call may have written
  // weights, which the following product loads without waiting.
  bool pdl = false;
  // The product may start together with this kernel; otherwise it starts when this kernel has loaded its rows. Starting
  // together is slower with 4-bit weights: the product's first stages are most of the weights, and their loads delay
  // the rows.
  bool early = false;
  bool wide = false;
};

cudaError_t PrepareQuantizeRows();

// Enqueues the quantization, before a product that uses PDL.
cudaError_t LaunchQuantizeRows(const QuantizeRows& problem, cudaStream_t stream);

}  // namespace jaxlowbit
