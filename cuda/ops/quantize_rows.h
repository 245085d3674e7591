// SPDX-License-Identifier: Apache-2.0
//
// Rounds rows of floats, tokens, to values of 8 bits for the product that follows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Columns that are interleaved (Buffers in problem.h), up to a multiple of which rows of values are padded.
inline constexpr int64_t kInterleavedColumns = 16;

struct QuantizeRows {
  ElementType from;  // kF32, kBf16 or kF16
  ElementType to;    // kInt8 or kE4m3
  int64_t rows, columns;
  const void* floats;   // [rows, columns]
  const float* factor;  // [columns], by which columns are divided first; null for none
  void* values;         // [rows, padded columns], interleaved; wide, bfloat16 in order
  float* scale;         // [rows]
  // The previous kernel in the stream belongs to the same call. (Another one may have written weights, for which the
  // product that follows does not wait.)
  bool pdl = false;
  // The product starts with the rounding, not when rows have been read. The loads of its weights then delay those of
  // rows, which costs more than it gains where the first stages hold most of the weights: in 4 bits.
  bool early = false;
  bool wide = false;
};

cudaError_t PrepareQuantizeRows();

// Enqueues the rounding, in front of a product that uses PDL.
cudaError_t LaunchQuantizeRows(const QuantizeRows& problem, cudaStream_t stream);

}  // namespace jaxlowbit
