// SPDX-License-Identifier: Apache-2.0
//
// The schedule of ragged products: rows of lhs are sorted by group, and each group has a separate weight. Sizes of
// groups are read on the device.
//
// Rows of a group are divided into blocks of up to `block` rows. A tile is a block and some columns. Blocks of local groups come
// first, group by group; then blocks of the other rows, which are zero in the result. A group begins
// at any row: a block whose group has fewer rows reads rows of the next group, and does not store them. CTAs are
// persistent: each makes a table of the groups in shared memory, and finds its tiles there.
//
//   lhs      ├── group 0 ──┼─ 1 ─┼───── group 2 ─────┼── no group ──┤
//   blocks   │  0   │  1  │  2  │  3   │   4  │  5   │  6   │   7   │
#pragma once

#include <cstdint>

#include "cuda/device/copy.cuh"
#include "cuda/device/divide.cuh"

namespace jaxlowbit {

// Kernel parameters.
struct RaggedParams {
  const int32_t* sizes;   // [groups]; a negative size is 0, and sizes are cut at the last row
  const int32_t* offset;  // the group of the first expert; null: 0
  int groups;
  int experts;          // weights; gated: pairs, first the gates of all experts, then their ups
  int rows;             // of lhs
  int block;            // rows of a block
  WideDivider columns;  // tiles along the columns, of every block
};

// The schedule of one tile; see Batched. kMayBeGated: the instance supports gated products.
template <bool kMayBeGated = true>
struct Ragged {
  int expert, first, begin, end;  // rows [begin, end) belong to the tile, whose row 0 is `first`
  const int& experts;
  const bool& gated;

  __device__ int Rows(int /*element*/) const { return end - first; }
  __device__ bool Has(int /*element*/, int m) const {
    return m >= begin - first && m < end - first;
  }
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

__device__ inline int BlocksOf(const RaggedParams& p, int rows) {
  return (rows + p.block - 1) / p.block;
}

// Called by a warp after the previous kernels have ended. Calls visit(expert, first row, end row, first block) in one
// lane for each local group, and for expert == p.experts with the end of the last group if there are groups behind it.
template <typename Visit>
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
      if (expert >= 0 && expert < p.experts) blocks += BlocksOf(p, next - begin);
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
      if (expert >= 0 && expert < p.experts) block += BlocksOf(p, next - begin);
      begin = next;
    }
    row = ragged::Add(row, sum, p.rows);
    totals.blocks += all;
    totals.begin = max(totals.begin, static_cast<int>(__reduce_max_sync(~0u, before)));
    totals.end = max(totals.end, static_cast<int>(__reduce_max_sync(~0u, end)));
  }
  return totals;
}

// A tile of a ragged product: at most a block of rows of an expert, beginning with `first` and ending before `end`, and a
// column. Negative expert: rows that are zero in all columns.
struct RaggedTile {
  int expert, column, first, end;
};

// The local groups, in shared memory: the totals, then first row and first block of each expert, and of the end.
class RaggedTable {
 public:
  static constexpr int kTotalsBytes = 16, kEntryBytes = 8;

  __device__ explicit RaggedTable(uint32_t shared) : shared_(shared) {}

  // Called by a warp after the previous kernels have ended.
  __device__ void Store(const RaggedParams& p) const {
    const RaggedTotals totals = ForEachGroup(
        p, [&](int expert, int begin, int, int block) { StoreEntry(expert, begin, block); });
    // Groups that the sizes do not list are empty: in front of the first one, or behind the last one.
    const int lane = threadIdx.x % 32;
    const int offset = p.offset == nullptr ? 0 : __ldcg(p.offset);
    for (int expert = lane; expert <= p.experts; expert += 32) {
      const int64_t group = int64_t{expert} + offset;
      if (group < 0) StoreEntry(expert, 0, 0);
      if (group >= p.groups) StoreEntry(expert, totals.end, totals.blocks);
    }
    if (lane == 0) {
      StoreShared16(shared_,
                    make_uint4(Word(totals.begin), Word(totals.end), Word(totals.blocks), 0));
    }
  }

  __device__ RaggedTotals Totals() const {
    const uint4 totals = LoadShared16(shared_);
    return {static_cast<int>(totals.x), static_cast<int>(totals.y), static_cast<int>(totals.z)};
  }

  // Tiles with a weight, which come first.
  __device__ int NumProducts(const RaggedParams& p) const {
    return Totals().blocks * p.columns.divisor;
  }

  // All tiles: then come tiles of rows that are zero.
  __device__ int NumTiles(const RaggedParams& p) const {
    const RaggedTotals totals = Totals();
    return totals.blocks * p.columns.divisor + BlocksOf(p, totals.begin) +
           BlocksOf(p, p.rows - totals.end);
  }

  // Blocks of a group vary fastest, then columns, so CTAs that share weights run together.
  __device__ RaggedTile Find(const RaggedParams& p, int number) const {
    const RaggedTotals totals = Totals();
    const int columns = p.columns.divisor, zeros = number - totals.blocks * columns;
    if (zeros >= 0) {
      const int before = BlocksOf(p, totals.begin);
      const int first = zeros < before ? zeros * p.block : totals.end + (zeros - before) * p.block;
      return {-1, 0, first, min(first + p.block, zeros < before ? totals.begin : p.rows)};
    }
    // The last expert whose first block is not behind this one: groups without rows share it with the next one.
    const int block = p.columns.Divide(number);
    int low = 0, high = p.experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool behind = static_cast<int>(LoadShared4(Entry(middle) + 4)) > block;
      (behind ? high : low) = middle;
    }
    const uint2 own = LoadShared8(Entry(low)), next = LoadShared8(Entry(low + 1));
    const int first = static_cast<int>(own.y), blocks = static_cast<int>(next.y) - first;
    const int in_group = number - first * columns, column = in_group / blocks;
    return {low, column, static_cast<int>(own.x) + (in_group - column * blocks) * p.block,
            static_cast<int>(next.x)};
  }

 private:
  __device__ static uint32_t Word(int value) { return static_cast<uint32_t>(value); }
  __device__ uint32_t Entry(int expert) const {
    return shared_ + kTotalsBytes + expert * kEntryBytes;
  }
  __device__ void StoreEntry(int expert, int row, int block) const {
    StoreShared4(Entry(expert), Word(row));
    StoreShared4(Entry(expert) + 4, Word(block));
  }

  const uint32_t shared_;
};

}  // namespace jaxlowbit
