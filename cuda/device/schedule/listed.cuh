// SPDX-License-Identifier: Apache-2.0
//
// The schedule of ragged products of few rows. Each row is an element of a dense batch. There are two forms:
//
//   list    names the group of each row. Rows need not be sorted. The kernel does not store rows of other devices' groups.
//   sizes   of the groups of sorted rows. The kernel stores zeros in rows without a local group.
//
// The list or the sizes were complete before the previous kernel started, or that kernel writes them (`waits`). Then the
// kernels behind this one start after they were written, since this one waits before it lets them start.
#pragma once

#include <cstdint>

#include "cuda/device/divide.cuh"
#include "cuda/device/schedule/local_experts.cuh"
#include "cuda/device/schedule/ragged.cuh"

namespace jaxlowbit {

// Kernel parameters.
struct ListedParams {
  const int32_t* list;    // [rows]; or the sizes, [groups]
  const int32_t* offset;  // the group of the first expert; null: 0
  int experts;            // weights; gated: pairs, first the gates of all experts, then their ups
  Divider rows_per_lhs;   // neighbouring rows that share a row of lhs
  bool waits;             // for the list or the sizes
  int groups;             // 0: there is a list
  int rows;               // of the result
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

namespace listed {

// Loads a number of the list from L2, since this SM may have cached an earlier list at this address.
__device__ inline int Load(const int32_t* number) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(number) : "memory");
  return value;
}

// The group of a row by the sizes of the groups; -1: none. A negative size is 0.
__device__ inline int GroupBySizes(const ListedParams& p, int row) {
  using ragged::kPerLane;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int begin = 0;  // the first row of these groups
  for (int base = 0; base < p.groups && begin <= row; base += 32 * kPerLane) {
    const int first = base + lane * kPerLane;
    int sizes[kPerLane], own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sizes[i] = first + i < p.groups ? min(max(Load(p.list + first + i), 0), p.rows) : 0;
      own = ragged::Add(own, sizes[i], p.rows);
    }
    int sum, found = -1;
    int end = ragged::Add(begin, ragged::ScanLanes(own, p.rows, &sum), p.rows);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int next = ragged::Add(end, sizes[i], p.rows);
      if (end <= row && row < next) found = first + i;
      end = next;
    }
    found = __reduce_max_sync(~0u, found);
    if (found >= 0) return found;
    begin = ragged::Add(begin, sum, p.rows);
  }
  return -1;
}

}  // namespace listed

// The expert of a row; negative: not local. Called by a warp.
__device__ inline int ExpertOf(const ListedParams& p, int row) {
  const int group = p.groups > 0 ? listed::GroupBySizes(p, row) : listed::Load(p.list + row);
  const int expert = LocalExperts(p.experts, p.offset).Position(group);
  return expert < p.experts ? expert : -1;
}

}  // namespace jaxlowbit
