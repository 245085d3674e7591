// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler of attention.
//
//   0 query      T[b, q, h, d]  T: f32, bf16 or f16
//   1 key        T[b, s, g, d]  consecutive h / g heads of the query share one of g
//   2 value      T[b, s, g, d]
//   3 position   s32[b, q], position of each query
//   4 positions  s32[b, s], position of each slot; -1 for empty slots
//   result 0 out  T[b, q, h, d]
//
// Attributes: reach, the number of leading slots to read; window, the number of positions visible to a query including
// its own, 0 for all; scale, f32.
#include <string>
#include <vector>

#include "cpu/qmm_cpu.h"
#include "cuda/extents.h"
#include "xla_ffi/call.h"
#include "xla_ffi/cpu_team.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

struct AttendBuffers {
  ffi::AnyBuffer query, key, value, position, positions, out;
};

ffi::Error CheckOperands(const AttendBuffers& b, const CpuAttend& a) {
  const auto has_type = [&](std::string_view name, ffi::AnyBuffer buffer) {
    return CheckType(name, buffer, buffer.element_type() == b.query.element_type(),
                     "the type of query");
  };
  const auto is_integer = [](std::string_view name, ffi::AnyBuffer buffer) {
    return CheckType(name, buffer, buffer.element_type() == ffi::DataType::S32, "s32");
  };
  constexpr std::string_view kCacheRule = "[batch, slots, kv_heads, head_size]";
  for (const ffi::Error& error :
       {has_type("key", b.key), has_type("value", b.value), has_type("out", b.out),
        is_integer("position", b.position), is_integer("positions", b.positions),
        CheckShape("key", b.key, {a.batch, a.slots, a.kv_heads, a.head_size}, kCacheRule),
        CheckShape("value", b.value, {a.batch, a.slots, a.kv_heads, a.head_size}, kCacheRule),
        CheckShape("position", b.position, {a.batch, a.queries}, "[batch, queries]"),
        CheckShape("positions", b.positions, {a.batch, a.slots}, "[batch, slots]"),
        CheckShape("out", b.out, {a.batch, a.queries, a.heads, a.head_size}, "that of query")}) {
    if (error.failure()) return error;
  }
  if (a.kv_heads < 1 || a.heads < a.kv_heads || a.heads % a.kv_heads != 0) {
    return InvalidArgument("query has " + std::to_string(a.heads) + " heads and key has " +
                           std::to_string(a.kv_heads) +
                           " but the first must be a multiple of the other.");
  }
  if (a.head_size < 1 || a.head_size > CpuAttend::kMaxHeadSize) {
    return InvalidArgument("heads have " + std::to_string(a.head_size) +
                           " elements but it must be from 1 to " +
                           std::to_string(CpuAttend::kMaxHeadSize) + ".");
  }
  if (a.reach < 0 || a.reach > a.slots) {
    return InvalidArgument("reach is " + std::to_string(a.reach) + " but must be from 0 to the " +
                           std::to_string(a.slots) + " slots of key.");
  }
  if (a.window < 0) {
    return InvalidArgument("window is " + std::to_string(a.window) +
                           " but must be positive, or 0 for all.");
  }
  return ffi::Error::Success();
}

ffi::Error Decode(const AttendBuffers& b, CpuAttend* a) {
  const auto type = FloatType(b.query.element_type());
  for (const ffi::Error& error :
       {CheckType("query", b.query, type.has_value(), "f32, bf16 or f16"),
        CheckRank("query", b.query, 4, "[batch, queries, heads, head_size]"),
        CheckRank("key", b.key, 4, "[batch, slots, kv_heads, head_size]")}) {
    if (error.failure()) return error;
  }
  const auto query = b.query.dimensions(), key = b.key.dimensions();
  a->type = *type;
  a->batch = query[0], a->queries = query[1], a->heads = query[2], a->head_size = query[3];
  a->slots = key[1], a->kv_heads = key[2];
  a->query = b.query.untyped_data();
  a->key = b.key.untyped_data();
  a->value = b.value.untyped_data();
  a->position = static_cast<const int32_t*>(b.position.untyped_data());
  a->positions = static_cast<const int32_t*>(b.positions.untyped_data());
  a->out = b.out.untyped_data();
  return CheckOperands(b, *a);
}

void Run(ffi::ThreadPool pool, const CpuAttend& a) {
  static const AttendClone& clone = RunnableCpuClones().front()->attend;
  const int64_t multiplications = 2 * a.batch * a.queries * a.heads * a.reach * a.head_size;
  const int64_t threads = UsefulThreads(pool, multiplications);
  const int64_t lines = CeilDiv(a.scratch_floats(), 16);
  std::vector<CacheLine> scratch(threads * lines), left(CeilDiv(a.left_floats(), 16));
  const auto scratch_of = [&](int64_t thread) { return scratch[thread * lines].values; };
  float* sums = left.empty() ? nullptr : left.front().values;
  Team team;
  team.AddPhase(a.num_tiles() * a.parts(), [&](int64_t task, int64_t thread) {
    clone.attend(a, task / a.parts(), task % a.parts(), scratch_of(thread), sums);
  });
  if (a.parts() > 1) {
    team.AddPhase(a.num_tiles(), [&](int64_t tile, int64_t thread) {
      clone.add_up(a, tile, scratch_of(thread), sums);
    });
  }
  team.Run(pool, threads);
}

// The result must not overlap operands. Calls lowered from Python have a separate result buffer.
ffi::Error CheckNoOverlap(const AttendBuffers& b) {
  for (const ffi::AnyBuffer& read : {b.query, b.key, b.value, b.position, b.positions}) {
    if (Overlap(ExtentOf(b.out), ExtentOf(read))) {
      return InvalidArgument(
          "the result lies over an operand of the call; put jax.lax.optimization_barrier around "
          "the result.");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                   ffi::AnyBuffer value, ffi::AnyBuffer position, ffi::AnyBuffer positions,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary dictionary) {
  return Guard("attend", [&] {
    const AttendBuffers buffers = {query, key, value, position, positions, *out};
    Attributes attributes(dictionary);
    CpuAttend attend;
    attend.reach = attributes.Get<int64_t>("reach");
    attend.window = attributes.Get<int64_t>("window");
    attend.scale = attributes.Get<float>("scale");
    ffi::Error error = attributes.Check();
    if (error.success()) error = Decode(buffers, &attend);
    if (error.success()) error = CheckNoOverlap(buffers);
    if (error.success()) Run(pool, attend);
    return error;
  });
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCpuAttendExecute, jaxlowbit::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // value
                                  .Arg<xla::ffi::AnyBuffer>()  // position
                                  .Arg<xla::ffi::AnyBuffer>()  // positions
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Attrs());
