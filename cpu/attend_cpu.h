// SPDX-License-Identifier: Apache-2.0
//
// attend_cpu: attention of queries to a cache of keys and values on the CPU, as independent tasks. Tasks depend only on
// the problem, so the result's bits do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// out[b, q, h] = sum over the visible slots s of
//                softmax_s(scale * query[b, q, h] . key[b, s, h / shared]) * value[b, s, h / shared]
//
// in float32; zeros without visible slots. Slot s < reach at position p is visible to a query at position q if 0 <= p
// <= q and, for nonzero `window`, q - p < window. Slots that are not visible to any query of the call may contain
// anything, including NaN. Buffers need only the alignment of an element.
struct CpuAttend {
  ElementType type = ElementType::kF32;  // of query, key, value and out
  int64_t batch = 0, queries = 0, heads = 0, kv_heads = 0, head_size = 0;
  int64_t slots = 0, reach = 0;
  int64_t window = 0;  // 0: unlimited
  float scale = 1;
  const void* query = nullptr;                  // [batch, queries, heads, head_size]
  const void *key = nullptr, *value = nullptr;  // [batch, slots, kv_heads, head_size]
  const int32_t* position = nullptr;            // [batch, queries]
  const int32_t* positions = nullptr;           // [batch, slots]; -1: empty
  void* out = nullptr;                          // [batch, queries, heads, head_size]

  // Query heads that share a key head are rows of one product: `shared` consecutive rows per query.
  int64_t shared() const { return heads / kv_heads; }
  // The maximum distance of a visible slot before the query.
  int32_t max_distance() const {
    return static_cast<int32_t>(window == 0 ? INT32_MAX : std::min<int64_t>(window - 1, INT32_MAX));
  }
  int64_t rows() const { return queries * shared(); }

  // A task has up to kRows rows and the blocks of kSlots slots of one part. Blocks are assigned to parts round-robin.
  static constexpr int64_t kRows = 48, kSlots = 64;
  static constexpr int64_t kMaxHeadSize = 256;
  int64_t tiles() const { return CeilDiv(rows(), kRows); }
  int64_t blocks() const { return CeilDiv(reach, kSlots); }
  int64_t parts() const {
    constexpr int64_t kTasks = 16;  // enough to keep threads busy
    const int64_t whole = std::max<int64_t>(batch * kv_heads * tiles(), 1);
    return std::max<int64_t>(std::min(kTasks / whole, blocks() / 2), 1);
  }
  int64_t num_tiles() const { return batch * kv_heads * tiles(); }

  // Sizes in floats: one row of sums, the scratch memory of a thread, and the partial results of one part and of all.
  int64_t padded() const { return CeilDiv(head_size, kAtom) * kAtom; }
  int64_t scratch_floats() const {
    return kRows * (2 * padded() + kSlots) + 2 * kSlots * padded() + 2 * kRows;
  }
  int64_t part_floats() const { return kRows * (padded() + 2); }
  int64_t left_floats() const { return parts() == 1 ? 0 : num_tiles() * parts() * part_floats(); }
};

// The functions compiled for one instruction set.
struct AttendClone {
  // Computes one part of a tile. With several parts, stores partial sums to `left`, else results to out.
  void (*attend)(const CpuAttend& attend, int64_t tile, int64_t part, float* scratch, float* left);
  // Combines the partial sums of a tile's parts, in order.
  void (*add_up)(const CpuAttend& attend, int64_t tile, float* scratch, const float* left);
};

}  // namespace jaxlowbit
