// SPDX-License-Identifier: Apache-2.0
//
// The schedule of ragged products whose CTAs have one block of rows each. Groups and blocks are as in ragged.cuh. The
// grid has an element for each block that there may be, since it does not depend on the sizes, and each CTA finds its
// element's block by prefix sums. Every CTA begins with this, so it is little work for one warp: sizes are loaded once,
// 4 for each lane, and stay in registers.
//
// Blocks are spread evenly over the elements, so that the elements without a block do not leave multiprocessors idle
// for a whole wave. These elements store the rows without a weight, which are zeros.
//
//   elements   │ 0 │ 1 │   │ 2 │ 3 │   │ 4 │ 5 │   │     6 blocks of 9
//
// Blocks of a group vary fastest in the order of its CTAs, then columns: CTAs that share weights run at the same time
// and find them in L2, also if an expert does not fit there.
//
// Listed. The expert of each row is given instead of sizes: each row is a block, and elements are rows. Rows of other
// experts are not stored. The list was complete before the previous kernel started, or that kernel writes it (`waits`).
// Then the kernels behind this one start after it was written, since this one waits before it lets them start.
#pragma once

#include <cstdint>

#include "cuda/device/divide.cuh"
#include "cuda/device/schedule/local_experts.cuh"
#include "cuda/device/schedule/ragged.cuh"

namespace jaxlowbit {

// Kernel parameters.
struct BlockParams {
  const int32_t* sizes;   // [groups]; as in RaggedParams
  const int32_t* offset;  // the group of the first expert; null: 0
  int groups;
  int experts;  // weights; gated: pairs
  int rows;     // of lhs
  int shift;    // a block is up to 2^shift rows
  WideDivider elements;
  const int32_t* list;   // the group of each row; null: rows are sorted by group
  bool waits;            // for the list
  Divider rows_per_lhs;  // rows that share a row of lhs; 1 without a list
};

// The place of a CTA in the grid: its element, and its cluster among those of the element.
struct GridPlace {
  int element, cluster, clusters;
};

// The rows without a weight: [0, begin) and [end, all rows). Of `stride` elements without a block, this is `number`.
struct ZeroRows {
  int number, stride, begin, end;
};

namespace blocks {

inline constexpr int kTogether = 32 * ragged::kPerLane;

// Of the groups so far: all rows, rows before the local groups, rows of the local groups, blocks.
struct Totals {
  int rows, before, local, blocks;
};

// The groups of a lane: the row at which each begins (the last one ends at begin[kPerLane]), the blocks of each, and
// the first block of all.
struct LaneGroups {
  int begin[ragged::kPerLane + 1], blocks[ragged::kPerLane], first;
};

// Scans kTogether groups, from `base` on.
__device__ inline LaneGroups Scan(const BlockParams& p, int base, int offset, Totals* totals) {
  using ragged::kPerLane;
  const int group = base + static_cast<int>(threadIdx.x) % 32 * kPerLane;
  int sizes[kPerLane], rows = 0, all;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sizes[i] = group + i < p.groups ? min(max(__ldcg(p.sizes + group + i), 0), p.rows) : 0;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) rows = ragged::Add(rows, sizes[i], p.rows);
  LaneGroups own;
  own.begin[0] = ragged::Add(totals->rows, ragged::ScanLanes(rows, p.rows, &all), p.rows);
  totals->rows = ragged::Add(totals->rows, all, p.rows);
  int before = 0, local = 0, count = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = group + i - offset;
    const bool is_local = expert >= 0 && expert < p.experts;
    own.begin[i + 1] = ragged::Add(own.begin[i], sizes[i], p.rows);
    const int of_group = own.begin[i + 1] - own.begin[i];
    own.blocks[i] = is_local ? (of_group + (1 << p.shift) - 1) >> p.shift : 0;
    if (expert < 0) before += of_group;
    if (is_local) local += of_group;
    count += own.blocks[i];
  }
  own.first = totals->blocks + ragged::ScanLanes(count, 1 << 30, &all);
  totals->blocks += all;
  totals->before += static_cast<int>(__reduce_add_sync(~0u, before));
  totals->local += static_cast<int>(__reduce_add_sync(~0u, local));
  return own;
}

// Blocks of the elements before `element`, of `blocks` in all.
__device__ inline int BlocksBefore(const BlockParams& p, int element, int blocks) {
  return static_cast<int>(__umul64hi(2 * static_cast<uint64_t>(element),
                                     static_cast<uint64_t>(blocks) * p.elements.magic));
}

// The tile of a cluster: block `number` of the `count` blocks of an expert.
__device__ inline RaggedTile TileOf(const BlockParams& p, const GridPlace& place, int expert,
                                    int begin, int end, int number, int count) {
  int column = place.cluster;
  if (count > 1) {
    const int in_group = number * place.clusters + place.cluster;
    column = in_group / count;
    number = in_group - column * count;
  }
  const int first = begin + (number << p.shift);
  return {expert, column, first, min(first + (1 << p.shift), end)};
}

}  // namespace blocks

// Loads from L2: this SM may have cached what an earlier list had at this address.
__device__ inline int LoadListed(const int32_t* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The block of a CTA's row, with a list. A negative expert: not local.
__device__ inline RaggedTile ListedBlock(const BlockParams& p, const GridPlace& place) {
  const int expert = LocalExperts(p.experts, p.offset).Position(LoadListed(p.list + place.element));
  return {expert < p.experts ? expert : -1, place.cluster, place.element, place.element + 1};
}

// Finds the block of a CTA's element. Called by a warp after the previous kernels have ended. Calls store(RaggedTile)
// in one lane; if the element has no block, with a negative expert, and also calls zero(ZeroRows) in all lanes.
template <typename Store, typename Zero>
__device__ void FindBlock(const BlockParams& p, const GridPlace& place, Store store, Zero zero) {
  using ragged::kPerLane;
  constexpr int kNever = 1 << 29, kUnknown = -1;
  const int lane = threadIdx.x % 32;
  const int offset = p.offset == nullptr ? 0 : min(max(__ldcg(p.offset), -kNever), kNever);
  blocks::Totals totals = {};
  blocks::LaneGroups own;
  int block = kUnknown, base = 0;
  for (;;) {
    own = blocks::Scan(p, base, offset, &totals);
    base += blocks::kTogether;
    if (block == kUnknown) {
      if (base < p.groups) continue;
      block = blocks::BlocksBefore(p, place.element, totals.blocks);
      if (blocks::BlocksBefore(p, place.element + 1, totals.blocks) == block) {
        if (lane == 0) store(RaggedTile{-1, 0, 0, 0});
        return zero(ZeroRows{place.element - block, p.elements.divisor - totals.blocks,
                             totals.before, totals.before + totals.local});
      }
      if (p.groups > blocks::kTogether) {  // from the first group on again
        totals = {}, base = 0;
        continue;
      }
    }
    if (block < totals.blocks) break;
  }
  int expert = kUnknown, begin = 0, end = 0, number = 0, count = 0, first = own.first;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (block >= first && block < first + own.blocks[i]) {
      expert = base - blocks::kTogether + lane * kPerLane + i - offset;
      begin = own.begin[i], end = own.begin[i + 1];
      number = block - first, count = own.blocks[i];
    }
    first += own.blocks[i];
  }
  if (count > 0) store(blocks::TileOf(p, place, expert, begin, end, number, count));
}

}  // namespace jaxlowbit
