// SPDX-License-Identifier: Apache-2.0
//
// The first operands and results of every call that contains a decode step's attention:
//
//   0 query       T, with b * h * d elements; T: bf16 or f16
//   1 key         T, with b * g * d elements; consecutive h / g heads of the query share one of g
//   2 value       T, with b * g * d elements
//   3 cos         f32[b, d / 2]  of the rotation of query and key
//   4 sin         f32[b, d / 2]
//   5 query_norm  f32[d]         or [0]: heads are not normalized
//   6 key_norm    f32[d]         or [0]
//   7 keys        C[b, s, g, d]  the cache; C: T, s8 or f8e4m3fn
//   8 values      C[b, s, g, d]
//   9 slot        s32[]          that key and value are written to
//  10 position    s32[b]         position of each query
//  11 positions   s32[b, s]      position of each slot, including the new ones; -1 for empty slots
//   then, if they are there, in this order:
//   key_scales    f32[b, s, g]   of 8-bit keys and values
//   value_scales  f32[b, s, g]
//   query_bias    f32, with h * d elements; with the attribute `biases`
//   key_bias      f32, with g * d elements
//   value_bias    f32, with g * d elements
//   sinks         f32[h]         with the attribute `sinks`
//   result 0 out           T, with b * h * d elements
//   result 1 keys          operand 7
//   result 2 values        operand 8
//   result 3 key_scales    the operand, of 8-bit keys and values
//   result 4 value_scales  the operand
//
// Attributes: reach, the number of leading slots to read; window, the number of positions visible to a query including
// its own, 0 for all; scale, f32; norm_epsilon, f32, for the head norms; neighbours, whether rotation pairs
// neighbouring elements instead of halves; biases and sinks, whether there are these operands, absent for no.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/ops/attend.h"
#include "cuda/ways.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

// Without the operands that may be absent, and scales.
inline constexpr size_t kAttendOperands = 12, kAttendResults = 3;

// The numbers of the first scale, the first bias and the sinks; 0: none.
struct AttendNumbers {
  size_t scales = 0, biases = 0, sinks = 0;
  size_t operands = kAttendOperands, results = kAttendResults;

  AttendNumbers(bool has_scales, const Attributes& attributes) {
    const auto next = [&](bool has, size_t count) {
      const size_t first = has ? operands : 0;
      operands += has ? count : 0;
      return first;
    };
    scales = next(has_scales, 2);
    biases = next(attributes.Find<bool>("biases").value_or(false), 3);
    sinks = next(attributes.Find<bool>("sinks").value_or(false), 1);
    results += has_scales ? 2 : 0;
  }
};

struct AttendBuffers {
  ffi::AnyBuffer query, key, value, cos, sin, query_norm, key_norm;
  ffi::AnyBuffer keys, values, slot, position, positions;
  ffi::AnyBuffer out, written_keys, written_values;
  std::optional<ffi::AnyBuffer> key_scales, value_scales;
  std::optional<ffi::AnyBuffer> query_bias, key_bias, value_bias, sinks;
  AttendNumbers numbers;

  // Requires `Has`.
  AttendBuffers(ffi::RemainingArgs args, ffi::RemainingRets rets, const Attributes& attributes)
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
        written_values(Of(rets, 2)),
        numbers(Is8Bit(keys), attributes) {
    if (numbers.scales > 0) {
      key_scales = Of(args, numbers.scales);
      value_scales = Of(args, numbers.scales + 1);
    }
    if (numbers.biases > 0) {
      query_bias = Of(args, numbers.biases);
      key_bias = Of(args, numbers.biases + 1);
      value_bias = Of(args, numbers.biases + 2);
    }
    if (numbers.sinks > 0) sinks = Of(args, numbers.sinks);
  }

  static bool Is8Bit(const ffi::AnyBuffer& buffer) {
    const ffi::DataType type = buffer.element_type();
    return type == ffi::DataType::S8 || type == ffi::DataType::F8E4M3FN;
  }

  // Whether a call has the operands and results.
  static bool Has(ffi::RemainingArgs args, ffi::RemainingRets rets, const Attributes& attributes) {
    if (args.size() < kAttendOperands || rets.size() < kAttendResults) return false;
    const AttendNumbers numbers(Is8Bit(Of(args, 7)), attributes);
    return args.size() >= numbers.operands && rets.size() >= numbers.results;
  }

 private:
  static ffi::AnyBuffer Of(ffi::RemainingArgs args, size_t i) {
    return args.get<ffi::AnyBuffer>(i).value();
  }
  static ffi::AnyBuffer Of(ffi::RemainingRets rets, size_t i) {
    return *rets.get<ffi::AnyBuffer>(i).value();
  }
};

// Checks biases and sinks, if there are any.
inline ffi::Error CheckAttendAddends(const AttendBuffers& b, const Attend& a) {
  const int64_t queries = a.heads * a.head_size, keys = a.kv_heads * a.head_size;
  struct Addend {
    std::string_view name;
    const std::optional<ffi::AnyBuffer>* buffer;
    int64_t count;
    std::string_view rule;
  };
  for (const Addend& own : {Addend{"query_bias", &b.query_bias, queries, "heads * head_size"},
                            Addend{"key_bias", &b.key_bias, keys, "kv_heads * head_size"},
                            Addend{"value_bias", &b.value_bias, keys, "kv_heads * head_size"},
                            Addend{"sinks", &b.sinks, a.heads, "heads"}}) {
    if (!own.buffer->has_value()) continue;
    ffi::Error error = CheckType(own.name, **own.buffer, ffi::DataType::F32);
    if (error.success()) error = CheckCount(own.name, **own.buffer, own.count, own.rule);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

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
  constexpr std::string_view kKeyRule = "batch * kv_heads * head_size";
  constexpr std::string_view kAngleRule = "[batch, head_size / 2]";
  for (const ffi::Error& error : {
           has_type("key", b.key),
           has_type("value", b.value),
           CheckType("keys", b.keys,
                     AttendBuffers::Is8Bit(b.keys) || FloatType(b.keys.element_type()) == type,
                     "the type of query, s8 or f8e4m3fn"),
           CheckType("values", b.values, b.values.element_type() == b.keys.element_type(),
                     "the type of keys"),
           has_type("out", b.out),
           is("cos", b.cos, ffi::DataType::F32),
           is("sin", b.sin, ffi::DataType::F32),
           is("query_norm", b.query_norm, ffi::DataType::F32),
           is("key_norm", b.key_norm, ffi::DataType::F32),
           is("slot", b.slot, ffi::DataType::S32),
           is("position", b.position, ffi::DataType::S32),
           is("positions", b.positions, ffi::DataType::S32),
           CheckCount("key", b.key, a.batch * a.kv_heads * a.head_size, kKeyRule),
           CheckCount("value", b.value, a.batch * a.kv_heads * a.head_size, kKeyRule),
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
  for (const auto* scales : {&b.key_scales, &b.value_scales}) {
    if (!scales->has_value()) continue;
    const std::string_view name = scales == &b.key_scales ? "key_scales" : "value_scales";
    ffi::Error error = is(name, **scales, ffi::DataType::F32);
    if (error.success()) {
      error =
          CheckShape(name, **scales, {a.batch, a.slots, a.kv_heads}, "[batch, slots, kv_heads]");
    }
    if (error.failure()) return error;
    if (a.head_size % 16 != 0) {
      return InvalidArgument("heads have " + std::to_string(a.head_size) +
                             " elements but 8-bit keys must have a multiple of 16.");
    }
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

// Reads and checks an attention, all but its pointers.
inline ffi::Error DecodeAttend(const AttendBuffers& b, Attributes* attributes, Attend* a) {
  a->reach = attributes->Get<int64_t>("reach");
  a->window = attributes->Get<int64_t>("window");
  a->scale = attributes->Get<float>("scale");
  a->epsilon = attributes->Get<float>("norm_epsilon");
  a->neighbours = attributes->Get<bool>("neighbours");
  const auto type = FloatType(b.query.element_type());
  for (const ffi::Error& error :
       {CheckType("query", b.query, type && *type != ElementType::kF32, "bf16 or f16"),
        CheckRank("keys", b.keys, 4, "[batch, slots, kv_heads, head_size]")}) {
    if (error.failure()) return error;
  }
  a->type = *type;
  a->cache = b.keys.element_type() == ffi::DataType::S8         ? ElementType::kInt8
             : b.keys.element_type() == ffi::DataType::F8E4M3FN ? ElementType::kE4m3
                                                                : *type;
  a->batch = b.keys.dimensions()[0];
  a->slots = b.keys.dimensions()[1];
  a->kv_heads = b.keys.dimensions()[2];
  a->head_size = b.keys.dimensions()[3];
  const auto elements = static_cast<int64_t>(b.query.element_count());
  const int64_t of_a_head = a->batch * a->head_size;
  a->heads = of_a_head == 0 ? a->kv_heads : elements / of_a_head;
  if (a->heads * of_a_head != elements) {
    return InvalidArgument("query has " + std::to_string(elements) +
                           " elements but must have those of whole heads, batch * head_size each.");
  }
  ffi::Error error = CheckAttendOperands(b, *a, *type);
  if (error.success()) error = CheckAttendSizes(*a);
  return error.failure() ? error : CheckAttendAddends(b, *a);
}

// Sets the pointers of an attention to its operands and results.
inline void SetPointers(void* const* operands, void* const* results, const AttendNumbers& numbers,
                        bool query_norm, bool key_norm, Attend* a) {
  const auto floats = [&](size_t i) { return static_cast<const float*>(operands[i]); };
  const auto integers = [&](int i) { return static_cast<const int32_t*>(operands[i]); };
  a->query = operands[0], a->key = operands[1], a->value = operands[2];
  a->cos = floats(3), a->sin = floats(4);
  a->query_norm = query_norm ? floats(5) : nullptr;
  a->key_norm = key_norm ? floats(6) : nullptr;
  a->keys = operands[7], a->values = operands[8];
  a->slot = integers(9), a->position = integers(10), a->positions = integers(11);
  if (numbers.scales > 0) {
    a->key_scales = static_cast<float*>(operands[numbers.scales]);
    a->value_scales = static_cast<float*>(operands[numbers.scales + 1]);
  }
  if (numbers.biases > 0) {
    a->query_bias = floats(numbers.biases), a->key_bias = floats(numbers.biases + 1);
    a->value_bias = floats(numbers.biases + 2);
  }
  if (numbers.sinks > 0) a->sinks = floats(numbers.sinks);
  a->out = results[0];
}

// The cache is updated in place. Results must not overlap other operands, except `out` at exactly the query's address,
// which LaunchAttend supports. Calls lowered from Python have separate buffers (_backends/cuda_attend.py). `results`:
// the number of the first result among the call's pointers.
inline ffi::Error CheckNoOverlap(const AttendBuffers& b, int results, Ways* ways) {
  const auto extent = [](int number, const ffi::AnyBuffer& buffer) {
    return AddressExtent{{number, 0}, static_cast<int64_t>(buffer.size_bytes())};
  };
  const AddressExtent query = extent(0, b.query), out = extent(results, b.out);
  std::vector<AddressExtent> cache = {extent(7, b.keys), extent(8, b.values)};
  const auto scales = static_cast<int>(b.numbers.scales);
  if (b.key_scales) cache.push_back(extent(scales, *b.key_scales));
  if (b.value_scales) cache.push_back(extent(scales + 1, *b.value_scales));
  bool overlaps = ways->Overlap(out, query) && !ways->IsSame(out.data, query.data);
  for (size_t i = 0; i < cache.size(); ++i) {
    const int updated = results + 1 + static_cast<int>(i);
    overlaps |= !ways->IsSame({updated, 0}, cache[i].data, true);
    overlaps |= ways->Overlap(cache[i], out) || ways->Overlap(cache[i], query);
    for (size_t j = 0; j < i; ++j) overlaps |= ways->Overlap(cache[i], cache[j]);
  }
  const auto is_overwritten = [&](const AddressExtent& own) {
    bool found = ways->Overlap(out, own);
    for (const AddressExtent& written : cache) found |= ways->Overlap(written, own);
    return found;
  };
  int number = 0;
  for (const ffi::AnyBuffer* read :
       {&b.query, &b.key, &b.value, &b.cos, &b.sin, &b.query_norm, &b.key_norm, &b.keys, &b.values,
        &b.slot, &b.position, &b.positions}) {
    const AddressExtent own = extent(number++, *read);
    if (read == &b.query || read == &b.keys || read == &b.values) continue;
    overlaps |= is_overwritten(own);
  }
  number = static_cast<int>(b.numbers.biases > 0 ? b.numbers.biases : b.numbers.sinks);
  for (const auto* read : {&b.query_bias, &b.key_bias, &b.value_bias, &b.sinks}) {
    if (read->has_value()) overlaps |= is_overwritten(extent(number++, **read));
  }
  if (!overlaps) return ffi::Error::Success();
  return InvalidArgument(
      "a result lies over an operand of the call; put jax.lax.optimization_barrier around the "
      "result.");
}

}  // namespace jaxlowbit
