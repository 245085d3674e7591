// SPDX-License-Identifier: Apache-2.0
//
// Adds the weighted results of the choices of each token (group_choices.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Types are kF32, kBf16 or kF16.
struct CombineChoices {
  ElementType weight_type, out_type;
  int tokens;
  int top;
  int64_t columns;
  const float* rows = nullptr;     // [tokens * top, columns]
  const int32_t* place = nullptr;  // [tokens, top], the row of each choice; -1: none
  const void* weight = nullptr;    // [tokens, top]
  void* out = nullptr;             // [tokens, columns]
};

cudaError_t PrepareCombineChoices();

// Enqueues out[t] = sum over i of weight[t, i] * rows[place[t, i]], in order of i, in float32, rounded once. Launched
// with PDL: the previous kernel belongs to the same call. tokens and top must be positive.
cudaError_t LaunchCombineChoices(const CombineChoices& combine, cudaStream_t stream);

}  // namespace jaxlowbit
