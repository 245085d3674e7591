// SPDX-License-Identifier: Apache-2.0
//
// The schedule of ragged products of few rows, which need not be sorted: a list names the group of each row. Each row
// is an element of a dense batch. A row whose group has no weight here is not stored.
//
// The list was complete before the previous kernel started, or that kernel writes it (`waits`). Then the kernels behind
// this one start after it was written, since this one waits before it lets them start.
#pragma once

#include <cstdint>

#include "cuda/device/divide.cuh"
#include "cuda/device/schedule/local_experts.cuh"

namespace jaxlowbit {

// Kernel parameters.
struct ListedParams {
  const int32_t* list;    // [rows]
  const int32_t* offset;  // the group of the first expert; null: 0
  int experts;            // weights; gated: pairs, first the gates of all experts, then their ups
  Divider rows_per_lhs;   // neighbouring rows that share a row of lhs
  bool waits;             // for the list
};

// The schedule of one row; see Batched.
struct Listed {
  int expert;
  const ListedParams& params;
  const bool& gated;

  __device__ bool Has(int /*element*/, int m) const { return m == 0; }
  __device__ int64_t Row(int element, int m) const { return element + m; }
  __device__ int Position(int element, int strip = 0) const {
    return gated && strip % 2 ? UpPosition(element) : expert;
  }
  __device__ int UpPosition(int /*element*/) const { return expert + params.experts; }
  // The row of lhs.
  __device__ int LhsRow(int element) const { return params.rows_per_lhs.Divide(element); }
};

// The expert of a row; negative: not local. Loads the list from L2, since this SM may have cached an earlier list at
// this address.
__device__ inline int ExpertOf(const ListedParams& p, int row) {
  int group;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n"
               : "=r"(group)
               : "l"(p.list + row)
               : "memory");
  const int expert = LocalExperts(p.experts, p.offset).Position(group);
  return expert < p.experts ? expert : -1;
}

}  // namespace jaxlowbit
