// SPDX-License-Identifier: Apache-2.0
//
// The operations between the products of a transformer block, on the CPU.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// total = x + addend, rounded; if `scales` is not null, normed = total / sqrt(mean(total^2) + epsilon) * scales.
struct AddedRows {
  ElementType type = ElementType::kF32;        // of all buffers but the scales
  ElementType scale_type = ElementType::kF32;  // `type` or float32
  int64_t n = 0;                               // elements of a row
  const void *x = nullptr, *addend = nullptr, *scales = nullptr;
  void *total = nullptr, *normed = nullptr;
  float epsilon = 0;
};

// out = activation(gate) * up.
struct GatedRows {
  ElementType type = ElementType::kF32;  // of out
  Activation activation = Activation::kSilu;
  int64_t n = 0;
  const float *gate = nullptr, *up = nullptr;
  void* out = nullptr;
};

// The functions compiled for one instruction set. Each computes rows [begin, end).
struct RowsClone {
  void (*add)(const AddedRows& rows, int64_t begin, int64_t end);
  void (*gate)(const GatedRows& rows, int64_t begin, int64_t end);
};

}  // namespace jaxlowbit
