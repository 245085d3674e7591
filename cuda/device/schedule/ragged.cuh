// SPDX-License-Identifier: Apache-2.0
//
// The schedule of ragged products: rows of lhs are sorted by group, and each group has a separate weight. Sizes of
// groups are read on the device.
//
// Rows of a group are divided into blocks of kBlock rows, which belong to one group each. Blocks of local groups come
// first, group by group; then blocks of the other rows, which are zero in the result. A group begins
// at any row: a block whose group has fewer rows reads rows of the next group, and does not store them.
//
//   lhs      ├── group 0 ──┼─ 1 ─┼───── group 2 ─────┼── no group ──┤
//   blocks   │  0   │  1  │  2  │  3   │   4  │  5   │  6   │   7   │
#pragma once

#include <cstdint>

namespace jaxlowbit {

// Kernel parameters.
struct RaggedParams {
  const int32_t* sizes;   // [groups]; a negative size is 0, and sizes are cut at the last row
  const int32_t* offset;  // the group of the first expert; null: 0
  int groups;
  int experts;  // weights; gated: pairs, first the gates of all experts, then their ups
  int rows;     // of lhs
};

// A block of rows. `expert` is negative for rows that are zero; `rows` is 0 if the block does not exist.
struct RaggedBlock {
  int expert, first, rows;
};

// The schedule of one block; see Batched. kMayBeGated: the instance supports gated products.
template <bool kMayBeGated = true>
struct Ragged {
  int expert, first, rows;
  const int& experts;
  const bool& gated;

  __device__ int Rows(int /*element*/) const { return rows; }
  __device__ int64_t Row(int /*element*/, int m) const { return first + m; }
  __device__ int Position(int element, int strip = 0) const {
    return kMayBeGated && gated && strip % 2 ? UpPosition(element) : expert;
  }
  __device__ int UpPosition(int /*element*/) const { return expert + experts; }
};

// Rows before the first local group, rows up to the end of the last one, and blocks of local groups.
struct RaggedTotals {
  int begin, end, blocks;
};

namespace ragged {

inline constexpr int kPerLane = 4;  // groups of a lane at a time

// a + b, at most `limit`; both are at most `limit`.
__device__ inline int Add(int a, int b, int limit) {
  const unsigned sum = static_cast<unsigned>(a) + static_cast<unsigned>(b);
  return static_cast<int>(sum < static_cast<unsigned>(limit) ? sum : static_cast<unsigned>(limit));
}

// Returns the sum over the lower lanes, at most `limit`. `total` becomes the sum over all lanes, at most `limit`.
__device__ inline int ScanLanes(int value, int limit, int* total) {
  const int lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum = Add(sum, other, limit);
  }
  *total = __shfl_sync(~0u, sum, 31);
  const int before = __shfl_up_sync(~0u, sum, 1);
  return lane == 0 ? 0 : before;
}

}  // namespace ragged

// Called by a warp after the previous kernels have ended. Calls visit(expert, first row, end row, first block) in one
// lane for each local group, and for expert == p.experts with the end of the last group if there are groups behind it.
template <int kBlock, typename Visit>
__device__ RaggedTotals ForEachGroup(const RaggedParams& p, Visit visit) {
  using ragged::kPerLane;
  constexpr int kNever = 1 << 29;
  const int lane = threadIdx.x % 32;
  const int offset = p.offset == nullptr ? 0 : min(max(__ldcg(p.offset), -kNever), kNever);
  RaggedTotals totals = {0, 0, 0};
  int row = 0;  // of the first of these groups
  for (int base = 0; base < p.groups; base += 32 * kPerLane) {
    int sizes[kPerLane], own = 0, blocks = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int group = base + lane * kPerLane + i;
      sizes[i] = group < p.groups ? min(max(__ldcg(p.sizes + group), 0), p.rows) : 0;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own = ragged::Add(own, sizes[i], p.rows);
    int sum;
    const int first = ragged::Add(row, ragged::ScanLanes(own, p.rows, &sum), p.rows);
    int begin = first, before = 0, end = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = base + lane * kPerLane + i - offset;
      const int next = ragged::Add(begin, sizes[i], p.rows);
      if (expert < 0) before = next;
      if (expert < p.experts) end = next;
      if (expert >= 0 && expert < p.experts) blocks += (next - begin + kBlock - 1) / kBlock;
      begin = next;
    }
    int all;
    int block = totals.blocks + ragged::ScanLanes(blocks, 1 << 30, &all);
    begin = first;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int group = base + lane * kPerLane + i, expert = group - offset;
      const int next = ragged::Add(begin, sizes[i], p.rows);
      if (group < p.groups && expert >= 0 && expert <= p.experts) visit(expert, begin, next, block);
      if (expert >= 0 && expert < p.experts) block += (next - begin + kBlock - 1) / kBlock;
      begin = next;
    }
    row = ragged::Add(row, sum, p.rows);
    totals.blocks += all;
    totals.begin = max(totals.begin, static_cast<int>(__reduce_max_sync(~0u, before)));
    totals.end = max(totals.end, static_cast<int>(__reduce_max_sync(~0u, end)));
  }
  return totals;
}

// A block of kBlock rows outside of all local groups. Block 0 follows the last block of a local group.
template <int kBlock>
__device__ RaggedBlock ZeroBlock(const RaggedParams& p, int begin, int end, int number) {
  const int before = (begin + kBlock - 1) / kBlock;
  const int first = number < before ? number * kBlock : end + (number - before) * kBlock;
  const int last = number < before ? begin : p.rows;
  return {-1, first, max(0, min(kBlock, last - first))};
}

// Finds block `number`; called by a warp. All lanes return it.
template <int kBlock>
__device__ RaggedBlock FindBlock(const RaggedParams& p, int number) {
  RaggedBlock found = {0, 0, 0};
  const RaggedTotals totals =
      ForEachGroup<kBlock>(p, [&](int expert, int begin, int end, int block) {
        const int first = begin + (number - block) * kBlock;
        if (expert < p.experts && number >= block && first < end) {
          found = {expert, first, min(kBlock, end - first)};
        }
      });
  if (number >= totals.blocks) {
    return ZeroBlock<kBlock>(p, totals.begin, totals.end, number - totals.blocks);
  }
  const int lane = __ffs(__ballot_sync(~0u, found.rows > 0)) - 1;
  return {__shfl_sync(~0u, found.expert, lane), __shfl_sync(~0u, found.first, lane),
          __shfl_sync(~0u, found.rows, lane)};
}

}  // namespace jaxlowbit
