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
  // If place is null, row i is of choice i, unless its expert is not local (group_choices.h).
  int experts = 0;
  const int32_t* expert = nullptr;  // [tokens, top]
  const int32_t* offset = nullptr;  // [1], or null: 0
  const void* weight = nullptr;     // [tokens, top]
  void* out = nullptr;              // [tokens, columns]
};

cudaError_t PrepareCombineChoices();

// Enqueues out[t] = sum over i of weight[t, i] * rows[place[t, i]], in order of i, in float32, rounded once. Launched
// with PDL: the previous kernel belongs to the same call, and does not write weight, expert or offset. tokens and top
// must be positive.
cudaError_t LaunchCombineChoices(const CombineChoices& combine, cudaStream_t stream);

}  // namespace jaxlowbit
