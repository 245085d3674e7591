// SPDX-License-Identifier: Apache-2.0
//
// LhsPath::kGathers: before the first tile, the consumers gather all activations of the CTA's part of k while the first
// weights load. Rows are copied to shared memory first, since gathering from global memory takes 32 accesses per warp.
// Gathered activations have the layout of a stage, without padding rows.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/device/permutation.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::sm90_stream {

__device__ inline void GatherLhs(const Params& p, const Share& share, Memory memory) {
  constexpr int kCount = kCopyBytes / 2;  // elements of a copy
  constexpr int kColumns = kAtom / kCount;
  const uint32_t gathered = memory.base + p.plan.gathered, rows = memory.base + p.plan.whole_rows;
  const int count = (share.atom_end - share.atom_begin) * kColumns;
  int columns[kCount];
  const auto load = [&](int i) {
    if (i < count) {
      LoadColumns(p.permutation, (share.atom_begin * kColumns + i) * kCount, p.part_columns,
                  columns);
    }
  };
  WaitForPreviousKernels();  // they may have written lhs
  load(threadIdx.x);
  const int row_copies = p.k_blocks * kColumns;
  const uint4* source =
      static_cast<const uint4*>(p.original_lhs) + ScheduleOf(p).Row(share.batch, 0) * row_copies;
  for (int i = threadIdx.x; i < p.m * row_copies; i += kConsumerThreads) {
    StoreShared16(rows + i * kCopyBytes, source[i]);
  }
  SynchronizeConsumers();
  for (int i = threadIdx.x; i < count; i += kConsumerThreads) {
    const int atom = i / kColumns, column = i % kColumns;
    for (int row = 0; row < p.m; ++row) {
      const uint32_t begin = rows + row * row_copies * kCopyBytes;
      uint32_t values[kCount / 2];
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        values[j] = LoadShared2(begin + columns[2 * j] * 2) |
                    LoadShared2(begin + columns[2 * j + 1] * 2) << 16;
      }
      StoreShared16(gathered + (atom * p.m + row) * kRowBytes + (column ^ row % 8) * kCopyBytes,
                    make_uint4(values[0], values[1], values[2], values[3]));
    }
    load(i + kConsumerThreads);
  }
  SynchronizeConsumers();
}

}  // namespace jaxlowbit::sm90_stream
