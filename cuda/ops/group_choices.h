// SPDX-License-Identifier: Apache-2.0
//
// Sorts the choices of a mixture of experts by expert, and copies the rows of their tokens in this order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Choice i of a token is number token * top + i. Experts `offset` to offset + experts - 1 are local. Local choices are
// sorted by expert, and by their numbers within an expert.
struct GroupChoices {
  int tokens;
  int top;
  int experts;
  int64_t columns;                  // of a row; elements have 16 bits
  bool pdl;                         // the previous kernel belongs to the same call
  const void* x = nullptr;          // [tokens, columns]
  const int32_t* expert = nullptr;  // [tokens, top]
  const int32_t* offset = nullptr;  // [1], or null: 0
  int32_t* sizes = nullptr;         // [experts], local choices of each expert
  int32_t* place = nullptr;  // [tokens, top], the place of a choice in the order; -1: not local
  void* rows =
      nullptr;  // [tokens * top, columns], x by place; rows behind the last place are not written
};

cudaError_t PrepareGroupChoices();

// Enqueues the computation of sizes, place and rows. tokens and top must be positive, and their product below 2^30.
cudaError_t LaunchGroupChoices(const GroupChoices& group, cudaStream_t stream);

}  // namespace jaxlowbit
