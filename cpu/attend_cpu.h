// SPDX-License-Identifier: Apache-2.0
//
// attend_cpu: attention of queries to a cache of keys and values on the CPU, as independent tasks. How the work is cut
// depends on the problem alone, so the result's bits do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// out[b, q, h] = the sum over the slots s that query (b, q) sees of softmax_s(scale * query[b, q, h] . key[b, s, h /
// shared]) * value[b, s, h / shared], in float32, or zeros if it sees none. It sees those of the first `reach` slots
// whose positions are not negative, not beyond its own, and less than `window`, if that is not 0, before it. What slots
// hold that no query of the call sees does not matter, nor if it is NaN. Buffers begin at any element.
struct CpuAttend {
  ElementType type = ElementType::kF32;  // of query, key, value and out
  int64_t batch = 0, queries = 0, heads = 0, kv_heads = 0, head_size = 0;
  int64_t slots = 0, reach = 0;
  int64_t window = 0;  // 0 for all
  float scale = 1;
  const void* query = nullptr;                  // [batch, queries, heads, head_size]
  const void *key = nullptr, *value = nullptr;  // [batch, slots, kv_heads, head_size]
  const int32_t* position = nullptr;            // [batch, queries]
  const int32_t* positions = nullptr;           // [batch, slots]; -1 for nothing
  void* out = nullptr;                          // [batch, queries, heads, head_size]

  // The heads of all queries that share keys are rows of one product: `shared` of each query after the other.
  int64_t shared() const { return heads / kv_heads; }
  // How far before its own position a query sees.
  int32_t farthest() const {
    return static_cast<int32_t>(window == 0 ? INT32_MAX : std::min<int64_t>(window - 1, INT32_MAX));
  }
  int64_t rows() const { return queries * shared(); }

  // A task has so many rows at most, and the blocks of slots of one part; parts take blocks in turn.
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

  // Floats of one row of sums in the scratch memory, of which a thread has one piece, and of what a part leaves.
  int64_t padded() const { return CeilDiv(head_size, kAtom) * kAtom; }
  int64_t scratch_floats() const {
    return kRows * (2 * padded() + kSlots) + 2 * kSlots * padded() + 2 * kRows;
  }
  int64_t part_floats() const { return kRows * (padded() + 2); }
  int64_t left_floats() const { return parts() == 1 ? 0 : num_tiles() * parts() * part_floats(); }
};

// Compiled for one instruction set.
struct AttendClone {
  // One part of a tile. With several parts the sums go to `left`, otherwise to out.
  void (*attend)(const CpuAttend& attend, int64_t tile, int64_t part, float* scratch, float* left);
  // Adds up what the parts of a tile left, in order.
  void (*add_up)(const CpuAttend& attend, int64_t tile, float* scratch, const float* left);
};

}  // namespace jaxlowbit
