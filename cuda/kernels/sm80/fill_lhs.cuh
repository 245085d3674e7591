// SPDX-License-Identifier: Apache-2.0
//
// Copies the lhs of a tile, stage by stage, from global to shared memory: kBlockM rows of I::kBlockK columns per stage.
#pragma once

#include "cuda/kernels/sm80/params.cuh"

namespace jaxlowbit::sm80 {

template <class I>
class LhsCopier {
 public:
  using T = typename I::T;

  __device__ LhsCopier(const Params& p, const Tile& tile) : p_(p) {
    const auto schedule = ScheduleOf<I>(p, tile);
    const int row = threadIdx.x / I::kLhsChunks, chunk = threadIdx.x % I::kLhsChunks;
    const int64_t column = int64_t{tile.stage_begin} * I::kBlockK + chunk * kPerChunk;
    source_ = static_cast<const T*>(p.lhs) +
              (schedule.Row(tile.batch, tile.m0) + row) * p.lhs_columns + column;
    left_ = static_cast<int>(p.lhs_columns - column);
    int rows = 0;
    for (int i = 0; i < kCopies; ++i) {
      rows |= tile.m0 + row + i * kRows < schedule.Rows(tile.batch) ? 1 << i : 0;
    }
    rows_ = Opaque(rows);
    target_ = Opaque(LhsChunk<I>(row, chunk) * kCopyBytes);
  }

  // Starts copying the next stage to `shared`.
  __device__ void CopyNext(uint32_t shared) {
    constexpr int kBytes = kRows * I::kLhsChunks * kCopyBytes;  // between the copies of one thread
    // With more threads than chunks, the last threads have no chunk.
    const bool mine = kRows <= I::kBlockM || target_ < I::kBlockM * I::kLhsChunks * kCopyBytes;
    if (!mine) {
    } else if (p_.lhs_aligned) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        CopyAsync(shared + target_ + i * kBytes, source_ + i * kRows * p_.lhs_columns,
                  (rows_ >> i & 1) != 0 && left_ > 0);
      }
    } else {
#pragma unroll 1  // rare path: unrolling would take registers from the common one
      for (int i = 0; i < kCopies * kPerChunk; ++i) {
        const int copy = i / kPerChunk, element = i % kPerChunk;
        const bool valid = (rows_ >> copy & 1) != 0 && element < left_;
        StoreShared2(shared + target_ + copy * kBytes + element * 2,
                     valid ? source_ + copy * kRows * p_.lhs_columns + element : nullptr);
      }
    }
    source_ += I::kBlockK;
    left_ -= I::kBlockK;
  }

 private:
  static constexpr int kPerChunk = kCopyBytes / 2;
  static constexpr int kRows = kThreads / I::kLhsChunks;  // copied at a time
  static constexpr int kCopies = (I::kBlockM + kRows - 1) / kRows;
  static_assert(kRows % 8 == 0, "a thread's rows must share their permutation");

  const Params& p_;
  const T* source_;
  int left_;    // columns left, from this thread's chunk of the next stage on
  int rows_;    // bit i: row i * kRows after this thread's first exists
  int target_;  // of this thread's first chunk
};

}  // namespace jaxlowbit::sm80
