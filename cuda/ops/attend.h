// SPDX-License-Identifier: Apache-2.0
//
// Attention of a decode step: appends a key and a value per sequence to the KV cache, then attends with one query per
// sequence.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gpu.h"
#include "cuda/limits.h"
#include "cuda/types.h"

namespace jaxlowbit {

inline constexpr int64_t kMaxAttendSlots = int64_t{1} << 30;
inline constexpr int64_t kMaxAttendBatch = 65535;

// Rotates, appends and attends:
//
//   q, k        = rotate(query), rotate(key)   after an RMSNorm of each head, if there are norms
//   keys[b, slot], values[b, slot] = k[b], value[b]
//   out[b, h]   = sum over the visible slots s of
//                 softmax_s(scale * q[b, h] . keys[b, s, h / shared]) * values[b, s, h / shared]
//
// Biases, if there are any, are added to query, key and value first. The sink of a head, if there are sinks, is a score
// without key and value: it is in the denominator of the softmax only.
//
// A cache of 8 bits stores k[b] / key_scales[b, slot], rounded, and values likewise; products multiply by the scales. As
// in quantize_rows.cu, a scale is the largest magnitude of its row divided by 127 or 448.
//
// Slot s < reach is visible to query b if 0 <= positions[b, s] <= position[b] and, with a window, position[b] -
// positions[b, s] < window. Other slots may contain anything, including NaN. Without visible slots, out is zero.
// Scores, softmax and sums are float32.
//
// Rotation: each pair (a, b) becomes (a * cos - b * sin, b * cos + a * sin). Pair i consists of element i of both
// halves or, with `neighbours`, of elements 2i and 2i + 1. Biases, and results of their addition, the norm and the
// rotation, are rounded to `type`.
struct Attend {
  ElementType type = ElementType::kBf16;   // of query, key, value and out
  ElementType cache = ElementType::kBf16;  // of keys and values: `type`, or 8 bits
  int64_t batch = 0, heads = 0, kv_heads = 0, head_size = 0;
  int64_t slots = 0, reach = 0;
  int64_t window = 0;  // 0: unlimited
  float scale = 1;
  bool neighbours = false;                      // pairs of the rotation
  float epsilon = 0;                            // of the norms
  const void* query = nullptr;                  // [batch, heads, head_size]
  const void *key = nullptr, *value = nullptr;  // [batch, kv_heads, head_size]
  const float *cos = nullptr, *sin = nullptr;   // [batch, head_size / 2]

  // [head_size], weights of the RMSNorms; null: none
  const float *query_norm = nullptr, *key_norm = nullptr;

  // [heads, head_size]; [kv_heads, head_size] each; null: none
  const float *query_bias = nullptr, *key_bias = nullptr, *value_bias = nullptr;
  const float* sinks = nullptr;  // [heads]; null: none

  void *keys = nullptr, *values = nullptr;               // [batch, slots, kv_heads, head_size]
  float *key_scales = nullptr, *value_scales = nullptr;  // [batch, slots, kv_heads], of 8 bits
  const int32_t* slot =
      nullptr;  // []: the slot to write, the same in every sequence; out of range: none
  const int32_t* position = nullptr;  // [batch], positions of the queries

  // [batch, slots], positions of the slots, including the written one; -1: empty
  const int32_t* positions = nullptr;

  void* out = nullptr;  // [batch, heads, head_size]

  // Whether the first kernel may start while previous kernels run (PDL). They must not write slot, position, positions,
  // cos, sin, sinks, keys, values or scales.
  bool pdl = false;
  bool holds_next = false;  // with pdl: the next kernel starts after the previous one has ended

  int64_t shared() const { return heads / kv_heads; }
};

// Number of splits of the slots. A CTA computes one split for one key head. Limited by the workspace.
int AttendSplits(const Attend& attend, const Device& device, int64_t workspace_bytes);

// Loads the kernels for this type and these sizes. Call before LaunchAttend; later calls return immediately.
cudaError_t LoadAttend(const Attend& attend, const Device& device);

// Enqueues the attention. With several splits, a second kernel combines them in order. Both kernels use PDL if
// available, the first one only with `attend.pdl`. Operands need no alignment beyond their elements; the workspace is
// 16-byte aligned. `out` must not overlap operands, except that it may equal `query`.
cudaError_t LaunchAttend(const Attend& attend, void* workspace, int64_t workspace_bytes,
                         const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
