// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of attention with one query per sequence. Execute only enqueues, so XLA may capture it.
//
//   0 query      T[b, h, d]     T: bf16 or f16
//   1 key        T[b, s, g, d]  consecutive h / g heads of the query share one of g
//   2 value      T[b, s, g, d]
//   3 position   s32[b], of the queries
//   4 positions  s32[b, s], of what the slots hold; -1 for nothing
//   result 0 out        T[b, h, d]
//   result 1 workspace  u8[bytes]
//
// Attributes: reach, the first slots that are read; window, how many positions back a query sees, its own among them,
// 0 for all; scale, f32.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/extents.h"
#include "cuda/ops/attend.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

struct AttendBuffers {
  ffi::AnyBuffer query, key, value, position, positions, out;
};

Extent ExtentOf(ffi::AnyBuffer buffer) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
}

ffi::Error CheckOperands(const AttendBuffers& b, const Attend& a, ElementType type) {
  const auto has_type = [&](std::string_view name, ffi::AnyBuffer buffer) {
    return CheckType(name, buffer, FloatType(buffer.element_type()) == type, "the type of query");
  };
  constexpr std::string_view kCacheRule = "[batch, slots, kv_heads, head_size]";
  for (const ffi::Error& error :
       {has_type("key", b.key), has_type("value", b.value), has_type("out", b.out),
        CheckType("position", b.position, b.position.element_type() == ffi::DataType::S32, "s32"),
        CheckType("positions", b.positions, b.positions.element_type() == ffi::DataType::S32,
                  "s32"),
        CheckShape("key", b.key, {a.batch, a.slots, a.kv_heads, a.head_size}, kCacheRule),
        CheckShape("value", b.value, {a.batch, a.slots, a.kv_heads, a.head_size}, kCacheRule),
        CheckShape("position", b.position, {a.batch}, "[batch]"),
        CheckShape("positions", b.positions, {a.batch, a.slots}, "[batch, slots]"),
        CheckShape("out", b.out, {a.batch, a.heads, a.head_size}, "[batch, heads, head_size]")}) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error CheckSizes(const Attend& a) {
  if (a.kv_heads < 1 || a.heads < a.kv_heads || a.heads % a.kv_heads != 0 ||
      a.shared() > kMaxAttendShared) {
    return Refuse("query has " + std::to_string(a.heads) + " heads and key has " +
                  std::to_string(a.kv_heads) + " but from 1 to " +
                  std::to_string(kMaxAttendShared) + " heads must share each of key.");
  }
  if (a.head_size < 1 || a.head_size % 8 != 0 || a.head_size > kMaxAttendHeadSize) {
    return Refuse("heads have " + std::to_string(a.head_size) +
                  " elements but it must be a multiple of 8 up to " +
                  std::to_string(kMaxAttendHeadSize) + ".");
  }
  if (a.slots > kMaxAttendSlots || a.batch > kMaxAttendBatch) {
    return Refuse("there are " + std::to_string(a.batch) + " sequences with " +
                  std::to_string(a.slots) + " slots but at most " +
                  std::to_string(kMaxAttendBatch) + " with " + std::to_string(kMaxAttendSlots) +
                  " are possible.");
  }
  if (a.reach < 0 || a.reach > a.slots) {
    return Refuse("reach is " + std::to_string(a.reach) + " but must be from 0 to the " +
                  std::to_string(a.slots) + " slots of key.");
  }
  if (a.window < 0) {
    return Refuse("window is " + std::to_string(a.window) + " but must be positive, or 0 for all.");
  }
  return ffi::Error::Success();
}

ffi::Error Decode(const AttendBuffers& b, Attend* a) {
  const auto type = FloatType(b.query.element_type());
  for (const ffi::Error& error :
       {CheckType("query", b.query, type && *type != ElementType::kF32, "bf16 or f16"),
        CheckRank("query", b.query, 3, "[batch, heads, head_size]"),
        CheckRank("key", b.key, 4, "[batch, slots, kv_heads, head_size]")}) {
    if (error.failure()) return error;
  }
  a->type = *type;
  a->batch = b.query.dimensions()[0];
  a->heads = b.query.dimensions()[1];
  a->head_size = b.query.dimensions()[2];
  a->slots = b.key.dimensions()[1];
  a->kv_heads = b.key.dimensions()[2];
  a->query = b.query.untyped_data();
  a->key = b.key.untyped_data();
  a->value = b.value.untyped_data();
  a->position = static_cast<const int32_t*>(b.position.untyped_data());
  a->positions = static_cast<const int32_t*>(b.positions.untyped_data());
  a->out = b.out.untyped_data();
  const ffi::Error error = CheckOperands(b, *a, *type);
  return error.failure() ? error : CheckSizes(*a);
}

// The result lies over no operand but, exactly, the query: LaunchAttend is right for that. What Python lowers has a
// result in a buffer of its own (_backends/cuda_attend.py).
ffi::Error CheckApart(const AttendBuffers& b) {
  const Extent out = ExtentOf(b.out);
  bool overlaps = out.data != b.query.untyped_data() && Overlap(out, ExtentOf(b.query));
  for (const ffi::AnyBuffer& read : {b.key, b.value, b.position, b.positions}) {
    overlaps |= Overlap(out, ExtentOf(read));
  }
  if (!overlaps) return ffi::Error::Success();
  return Refuse(
      "the result lies over an operand of the call; put jax.lax.optimization_barrier around the "
      "result.");
}

template <Stage kStage>
ffi::Error AttendCall(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key,
                      ffi::AnyBuffer value, ffi::AnyBuffer position, ffi::AnyBuffer positions,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                      ffi::Dictionary dictionary) {
  return Guard("attend", [&] {
    const AttendBuffers buffers = {query, key, value, position, positions, *out};
    Attributes attributes(dictionary);
    Attend attend;
    attend.reach = attributes.Get<int64_t>("reach");
    attend.window = attributes.Get<int64_t>("window");
    attend.scale = attributes.Get<float>("scale");
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.success()) error = Decode(buffers, &attend);
    // Place has loaded the kernels. Initialize may be given other buffers than Execute.
    if (error.failure() || kStage == Stage::kInitialize) return error;
    error = CheckApart(buffers);
    if (error.failure()) return error;
    const Workspace room(*workspace);
    return ToError(LaunchAttend(attend, room.data, room.bytes, DeviceInfo(place.device), stream),
                   "launching attention of " + std::to_string(attend.batch) + " queries on CUDA " +
                       "device " + std::to_string(place.device));
  });
}

template <ffi::ExecutionStage kStage>
auto BindAttend() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // query
      .template Arg<ffi::AnyBuffer>()        // key
      .template Arg<ffi::AnyBuffer>()        // value
      .template Arg<ffi::AnyBuffer>()        // position
      .template Arg<ffi::AnyBuffer>()        // positions
      .template Ret<ffi::AnyBuffer>()        // out
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaAttendInitialize,
                              jaxlowbit::AttendCall<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindAttend<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaAttendExecute,
                              jaxlowbit::AttendCall<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindAttend<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
