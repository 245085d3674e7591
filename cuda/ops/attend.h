// SPDX-License-Identifier: Apache-2.0
//
// Attention of one query per sequence to a cache of keys and values.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gpu.h"
#include "cuda/types.h"

namespace jaxlowbit {

inline constexpr int64_t kMaxAttendHeadSize = 256;  // a multiple of 8
inline constexpr int64_t kMaxAttendShared = 16;     // heads that share keys and values
inline constexpr int64_t kMaxAttendSlots = int64_t{1} << 30;
inline constexpr int64_t kMaxAttendBatch = 65535;

// out[b, h] = the sum over the slots s that query b sees of softmax_s(scale * query[b, h] . key[b, s, h / shared]) *
// value[b, s, h / shared], in float32, or zeros if it sees none. It sees those of the first `reach` slots whose
// positions are not negative, not beyond its own, and less than `window`, if that is not 0, before it. What other slots
// hold does not matter, nor if it is NaN. Query, key, value and out have `type`.
struct Attend {
  ElementType type = ElementType::kBf16;
  int64_t batch = 0, heads = 0, kv_heads = 0, head_size = 0;
  int64_t slots = 0, reach = 0;
  int64_t window = 0;  // 0 for all
  float scale = 1;
  const void* query = nullptr;                  // [batch, heads, head_size]
  const void *key = nullptr, *value = nullptr;  // [batch, slots, kv_heads, head_size]
  const int32_t* position = nullptr;            // [batch], of the queries

  // [batch, slots], of what the slots hold; -1 for nothing
  const int32_t* positions = nullptr;

  void* out = nullptr;  // [batch, heads, head_size]

  int64_t shared() const { return heads / kv_heads; }
};

// How many parts the slots are divided into, each a CTA for every key head: as many as are fast, and no more than the
// workspace has room for.
int AttendSplits(const Attend& attend, const Device& device, int64_t workspace_bytes);

cudaError_t PrepareAttend();

// Enqueues the attention. With more than one split a second kernel, under PDL if the device has it, adds them up in
// order. Operands may begin at any element; the workspace begins at a multiple of 16 bytes. Results may lie exactly
// over `query`, and over nothing else.
cudaError_t LaunchAttend(const Attend& attend, void* workspace, int64_t workspace_bytes,
                         const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
