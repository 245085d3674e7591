// SPDX-License-Identifier: Apache-2.0
//
// The first operands and results of every call that contains a decode step's attention:
//
//   0 query       T[b, h, d]     T: bf16 or f16
//   1 key         T[b, g, d]     consecutive h / g heads of the query share one of g
//   2 value       T[b, g, d]
//   3 cos         f32[b, d / 2]  of the rotation of query and key
//   4 sin         f32[b, d / 2]
//   5 query_norm  f32[d]         or [0]: heads are not normalized
//   6 key_norm    f32[d]         or [0]
//   7 keys        T[b, s, g, d]  the cache
//   8 values      T[b, s, g, d]
//   9 slot        s32[]          that key and value are written to
//  10 position    s32[b]         position of each query
//  11 positions   s32[b, s]      position of each slot, including the new ones; -1 for empty slots
//   result 0 out        T, with b * h * d elements
//   result 1 keys       operand 7
//   result 2 values     operand 8
//
// Attributes: reach, the number of leading slots to read; window, the number of positions visible to a query including
// its own, 0 for all; scale, f32; norm_epsilon, f32, for the head norms; neighbours, whether rotation pairs
// neighbouring elements instead of halves.
#pragma once

#include <string>

#include "cuda/extents.h"
#include "cuda/ops/attend.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

inline constexpr size_t kAttendOperands = 12, kAttendResults = 3;

struct AttendBuffers {
  ffi::AnyBuffer query, key, value, cos, sin, query_norm, key_norm;
  ffi::AnyBuffer keys, values, slot, position, positions;
  ffi::AnyBuffer out, written_keys, written_values;

  // Requires at least this many operands and results.
  AttendBuffers(ffi::RemainingArgs args, ffi::RemainingRets rets)
      : query(Of(args, 0)),
        key(Of(args, 1)),
        value(Of(args, 2)),
        cos(Of(args, 3)),
        sin(Of(args, 4)),
        query_norm(Of(args, 5)),
        key_norm(Of(args, 6)),
        keys(Of(args, 7)),
        values(Of(args, 8)),
        slot(Of(args, 9)),
        position(Of(args, 10)),
        positions(Of(args, 11)),
        out(Of(rets, 0)),
        written_keys(Of(rets, 1)),
        written_values(Of(rets, 2)) {}

 private:
  static ffi::AnyBuffer Of(ffi::RemainingArgs args, size_t i) {
    return args.get<ffi::AnyBuffer>(i).value();
  }
  static ffi::AnyBuffer Of(ffi::RemainingRets rets, size_t i) {
    return *rets.get<ffi::AnyBuffer>(i).value();
  }
};

inline ffi::Error CheckAttendOperands(const AttendBuffers& b, const Attend& a, ElementType type) {
  const auto has_type = [&](std::string_view name, ffi::AnyBuffer buffer) {
    return CheckType(name, buffer, FloatType(buffer.element_type()) == type, "the type of query");
  };
  const auto is = [&](std::string_view name, ffi::AnyBuffer buffer, ffi::DataType wanted) {
    return CheckType(name, buffer, buffer.element_type() == wanted,
                     wanted == ffi::DataType::S32 ? "s32" : "f32");
  };
  const auto is_norm = [&](std::string_view name, ffi::AnyBuffer buffer) {
    const int64_t size = buffer.element_count() == 0 ? 0 : a.head_size;
    return CheckShape(name, buffer, {size}, "[head_size] or [0]");
  };
  constexpr std::string_view kCacheRule = "[batch, slots, kv_heads, head_size]";
  constexpr std::string_view kKeyRule = "[batch, kv_heads, head_size]";
  constexpr std::string_view kAngleRule = "[batch, head_size / 2]";
  for (const ffi::Error& error : {
           has_type("key", b.key),
           has_type("value", b.value),
           has_type("keys", b.keys),
           has_type("values", b.values),
           has_type("out", b.out),
           is("cos", b.cos, ffi::DataType::F32),
           is("sin", b.sin, ffi::DataType::F32),
           is("query_norm", b.query_norm, ffi::DataType::F32),
           is("key_norm", b.key_norm, ffi::DataType::F32),
           is("slot", b.slot, ffi::DataType::S32),
           is("position", b.position, ffi::DataType::S32),
           is("positions", b.positions, ffi::DataType::S32),
           CheckShape("key", b.key, {a.batch, a.kv_heads, a.head_size}, kKeyRule),
           CheckShape("value", b.value, {a.batch, a.kv_heads, a.head_size}, kKeyRule),
           CheckShape("cos", b.cos, {a.batch, a.head_size / 2}, kAngleRule),
           CheckShape("sin", b.sin, {a.batch, a.head_size / 2}, kAngleRule),
           is_norm("query_norm", b.query_norm),
           is_norm("key_norm", b.key_norm),
           CheckShape("keys", b.keys, {a.batch, a.slots, a.kv_heads, a.head_size}, kCacheRule),
           CheckShape("values", b.values, {a.batch, a.slots, a.kv_heads, a.head_size}, kCacheRule),
           CheckShape("slot", b.slot, {}, "[]"),
           CheckShape("position", b.position, {a.batch}, "[batch]"),
           CheckShape("positions", b.positions, {a.batch, a.slots}, "[batch, slots]"),
       }) {
    if (error.failure()) return error;
  }
  const auto elements = static_cast<int64_t>(b.out.element_count());
  if (elements == a.batch * a.heads * a.head_size) return ffi::Error::Success();
  return InvalidArgument("out has " + std::to_string(elements) +
                         " elements but must have those of query.");
}

inline ffi::Error CheckAttendSizes(const Attend& a) {
  if (a.kv_heads < 1 || a.heads < a.kv_heads || a.heads % a.kv_heads != 0 ||
      a.shared() > kMaxAttendShared) {
    return InvalidArgument("query has " + std::to_string(a.heads) + " heads and keys have " +
                           std::to_string(a.kv_heads) + " but from 1 to " +
                           std::to_string(kMaxAttendShared) + " heads must share each of these.");
  }
  if (a.head_size < 1 || a.head_size % 8 != 0 || a.head_size > kMaxAttendHeadSize) {
    return InvalidArgument("heads have " + std::to_string(a.head_size) +
                           " elements but it must be a multiple of 8 up to " +
                           std::to_string(kMaxAttendHeadSize) + ".");
  }
  if (a.slots > kMaxAttendSlots || a.batch > kMaxAttendBatch) {
    return InvalidArgument("there are " + std::to_string(a.batch) + " sequences with " +
                           std::to_string(a.slots) + " slots but at most " +
                           std::to_string(kMaxAttendBatch) + " with " +
                           std::to_string(kMaxAttendSlots) + " are possible.");
  }
  if (a.reach < 0 || a.reach > a.slots) {
    return InvalidArgument("reach is " + std::to_string(a.reach) + " but must be from 0 to the " +
                           std::to_string(a.slots) + " slots of keys.");
  }
  if (a.window < 0) {
    return InvalidArgument("window is " + std::to_string(a.window) +
                           " but must be positive, or 0 for all.");
  }
  return ffi::Error::Success();
}

// Reads operands, the first results and the attributes of a call.
inline ffi::Error DecodeAttend(const AttendBuffers& b, Attributes* attributes, Attend* a) {
  a->reach = attributes->Get<int64_t>("reach");
  a->window = attributes->Get<int64_t>("window");
  a->scale = attributes->Get<float>("scale");
  a->epsilon = attributes->Get<float>("norm_epsilon");
  a->neighbours = attributes->Get<bool>("neighbours");
  const auto type = FloatType(b.query.element_type());
  for (const ffi::Error& error :
       {CheckType("query", b.query, type && *type != ElementType::kF32, "bf16 or f16"),
        CheckRank("query", b.query, 3, "[batch, heads, head_size]"),
        CheckRank("keys", b.keys, 4, "[batch, slots, kv_heads, head_size]")}) {
    if (error.failure()) return error;
  }
  const auto norm = [](ffi::AnyBuffer buffer) {
    return buffer.element_count() == 0 ? nullptr : static_cast<const float*>(buffer.untyped_data());
  };
  a->type = *type;
  a->batch = b.query.dimensions()[0];
  a->heads = b.query.dimensions()[1];
  a->head_size = b.query.dimensions()[2];
  a->slots = b.keys.dimensions()[1];
  a->kv_heads = b.keys.dimensions()[2];
  a->query = b.query.untyped_data();
  a->key = b.key.untyped_data();
  a->value = b.value.untyped_data();
  a->cos = static_cast<const float*>(b.cos.untyped_data());
  a->sin = static_cast<const float*>(b.sin.untyped_data());
  a->query_norm = norm(b.query_norm);
  a->key_norm = norm(b.key_norm);
  a->keys = b.keys.untyped_data();
  a->values = b.values.untyped_data();
  a->slot = static_cast<const int32_t*>(b.slot.untyped_data());
  a->position = static_cast<const int32_t*>(b.position.untyped_data());
  a->positions = static_cast<const int32_t*>(b.positions.untyped_data());
  a->out = b.out.untyped_data();
  const ffi::Error error = CheckAttendOperands(b, *a, *type);
  return error.failure() ? error : CheckAttendSizes(*a);
}

// The cache is updated in place. Results must not overlap other operands, except `out` at exactly the query's address,
// which LaunchAttend supports. Calls lowered from Python have separate buffers (_backends/cuda_attend.py).
inline ffi::Error CheckNoOverlap(const AttendBuffers& b) {
  const Extent out = ExtentOf(b.out), keys = ExtentOf(b.keys), values = ExtentOf(b.values);
  const Extent query = ExtentOf(b.query);
  bool overlaps = b.written_keys.untyped_data() != keys.data ||
                  b.written_values.untyped_data() != values.data || Overlap(keys, values) ||
                  (out.data != query.data && Overlap(out, query));
  for (const Extent& cache : {keys, values})
    overlaps |= Overlap(cache, out) || Overlap(cache, query);
  for (const ffi::AnyBuffer& read :
       {b.key, b.value, b.cos, b.sin, b.query_norm, b.key_norm, b.slot, b.position, b.positions}) {
    for (const Extent& written : {out, keys, values}) overlaps |= Overlap(written, ExtentOf(read));
  }
  if (!overlaps) return ffi::Error::Success();
  return InvalidArgument(
      "a result lies over an operand of the call; put jax.lax.optimization_barrier around the "
      "result.");
}

}  // namespace jaxlowbit
