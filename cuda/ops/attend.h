// SPDX-License-Identifier: Apache-2.0
//
// A decode step's attention: one query per sequence to a cache of keys and values, to which it first adds its own.
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

// Rotates, appends and attends:
//
//   q, k        = rotate(query), rotate(key)   after an RMSNorm of each head where there are norms
//   keys[b, slot], values[b, slot] = k[b], value[b]
//   out[b, h]   = the sum over the slots s that query b sees of
//                 softmax_s(scale * q[b, h] . keys[b, s, h / shared]) * values[b, s, h / shared]
//
// Scores, softmax and sums are float32; a query that sees nothing gets zeros. It sees those of the first `reach` slots
// whose positions are not negative, not beyond its own, and less than `window`, if that is not 0, before it. What other
// slots hold does not matter, nor if it is NaN.
//
// A rotation turns pairs of elements: (a, b) becomes (a * cos - b * sin, b * cos + a * sin). Pair i is the elements i of
// both halves, or the neighbours 2i and 2i + 1. What is normalized and what is rotated is rounded to `type`.
struct Attend {
  ElementType type = ElementType::kBf16;  // of query, key, value, keys, values and out
  int64_t batch = 0, heads = 0, kv_heads = 0, head_size = 0;
  int64_t slots = 0, reach = 0;
  int64_t window = 0;  // 0 for all
  float scale = 1;
  bool neighbours = false;                      // pairs of the rotation
  float epsilon = 0;                            // of the norms
  const void* query = nullptr;                  // [batch, heads, head_size]
  const void *key = nullptr, *value = nullptr;  // [batch, kv_heads, head_size]
  const float *cos = nullptr, *sin = nullptr;   // [batch, head_size / 2]

  // [head_size], multiplied with what is normalized; null: heads are not normalized
  const float *query_norm = nullptr, *key_norm = nullptr;

  void *keys = nullptr, *values = nullptr;  // [batch, slots, kv_heads, head_size]
  const int32_t* slot =
      nullptr;  // [], that is written, of every sequence; none if it is not one of the slots
  const int32_t* position = nullptr;  // [batch], of the queries

  // [batch, slots], of what the slots hold, the one that is written among them; -1 for nothing
  const int32_t* positions = nullptr;

  void* out = nullptr;  // [batch, heads, head_size]

  int64_t shared() const { return heads / kv_heads; }
};

// How many parts the slots are divided into, each a CTA for every key head: as many as are fast, and no more than the
// workspace has room for.
int AttendSplits(const Attend& attend, const Device& device, int64_t workspace_bytes);

// Loads the kernels of an attention on a device, once; its type and its sizes choose them. Before LaunchAttend.
cudaError_t LoadAttend(const Attend& attend, const Device& device);

// Enqueues the attention. With more than one split a second kernel, under PDL if the device has it, adds them up in
// order. Operands may begin at any element; the workspace begins at a multiple of 16 bytes. `out` may lie exactly
// over `query`, and over nothing else.
cudaError_t LaunchAttend(const Attend& attend, void* workspace, int64_t workspace_bytes,
                         const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
