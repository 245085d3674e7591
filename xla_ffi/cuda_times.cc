// SPDX-License-Identifier: Apache-2.0
//
// The handler that measures: instead of multiplying once, it times the product by each choice it is
// given. It waits for the device, so XLA must not capture it.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/timing.h"
#include "xla_ffi/choice.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// The buffers of a product by each matrix of the stack that `operands` hold.
std::vector<Buffers> CallsOf(const Operands& operands, void* workspace) {
  const QuantizedMatmul& p = operands.problem;
  const auto at = [](const void* start, int64_t bytes) {
    return start == nullptr ? nullptr : static_cast<const char*>(start) + bytes;
  };
  const int64_t words = p.n_blocks() * p.k_blocks() * p.words_per_atom();
  const int64_t values = p.n_blocks() * p.groups() * kAtom;
  std::vector<Buffers> calls;
  for (int64_t i = 0; i < p.num_weights; ++i) {
    Buffers buffers = operands.buffers;
    buffers.packed += i * words;
    buffers.scale = at(buffers.scale, i * values * p.scale_bytes());
    buffers.zero = at(buffers.zero, i * values * p.zero_bytes());
    buffers.index = nullptr;
    buffers.workspace = workspace;
    calls.push_back(buffers);
  }
  return calls;
}

// microseconds[i] = the median time of lhs @ a matrix of the stack, by choices[i].
ffi::Error ExecuteTimes(cudaStream_t stream, int32_t device, ffi::AnyBuffer lhs,
                        ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                        ffi::AnyBuffer index, ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                        ffi::Result<ffi::Buffer<ffi::F32>> microseconds, int64_t bits,
                        int64_t group_size, int64_t calls, ffi::Span<const int64_t> choices) {
  Operands operands;
  ffi::Error error =
      DecodeOperands(lhs, {packed, scale, zero, index}, *out, {bits, group_size}, &operands);
  if (error.failure()) return error;
  QuantizedMatmul problem = operands.problem;
  std::vector<Buffers> buffers = CallsOf(operands, workspace->untyped_data());
  if (calls < 1 || calls > static_cast<int64_t>(buffers.size())) {
    return Refuse("calls is " + std::to_string(calls) + " but must be from 1 to the " +
                  std::to_string(buffers.size()) + " matrices of packed.");
  }
  buffers.resize(calls);
  problem.num_weights = 1;
  const std::vector<Choice> decoded = DecodeChoices(choices.begin(), choices.end());
  if (decoded.size() * kChoiceNumbers != choices.size() ||
      decoded.size() != microseconds->element_count()) {
    return Refuse("choices holds " + std::to_string(choices.size()) + " numbers but needs " +
                  std::to_string(kChoiceNumbers) + " for each of the " +
                  std::to_string(microseconds->element_count()) + " results.");
  }
  for (const Choice& choice : decoded) {
    const std::string reason = Unsupported(choice, problem, DeviceInfo(device),
                                           static_cast<int64_t>(workspace->element_count()));
    if (!reason.empty()) return Refuse("a choice cannot be timed: " + reason + ".");
  }
  std::vector<float> times;
  const std::string what = "timing " + Describe(problem, device);
  // What comes before in the stream writes the operands.
  error = ToError(cudaStreamSynchronize(stream), what);
  if (error.failure()) return error;
  error = ToError(TimeChoices(problem, buffers, decoded, device, &times), what);
  if (error.failure()) return error;
  error = ToError(cudaMemcpyAsync(microseconds->typed_data(), times.data(),
                                  times.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
                  what);
  if (error.failure()) return error;
  return ToError(cudaStreamSynchronize(stream), what);
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaTimesExecute, jaxlowbit::ExecuteTimes,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()              // lhs
                                  .Arg<xla::ffi::AnyBuffer>()              // packed
                                  .Arg<xla::ffi::AnyBuffer>()              // scale
                                  .Arg<xla::ffi::AnyBuffer>()              // zero
                                  .Arg<xla::ffi::AnyBuffer>()              // index
                                  .Ret<xla::ffi::AnyBuffer>()              // out
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()   // workspace
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // microseconds
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("calls")
                                  .Attr<xla::ffi::Span<const int64_t>>("choices"));
