// SPDX-License-Identifier: Apache-2.0
//
// The autotuner's handler: times a product with each given choice. It synchronizes with the device, so XLA must not
// capture it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/extents.h"
#include "cuda/select/select.h"
#include "cuda/timing.h"
#include "xla_ffi/call.h"
#include "xla_ffi/cuda_error.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// The buffers of the product with each matrix of the stack in `operands`.
std::vector<Buffers> CallsOf(const Operands& operands, void* workspace) {
  std::vector<Buffers> calls;
  for (int64_t i = 0; i < operands.problem.num_weights; ++i) {
    Buffers buffers = operands.buffers;
    SkipWeights(operands.problem, i, &buffers);
    buffers.index = nullptr;
    buffers.workspace = workspace;
    calls.push_back(buffers);
  }
  return calls;
}

// Decodes the concatenated choices of an attribute.
std::vector<Choice> DecodeChoices(ffi::Span<const int64_t> numbers) {
  std::vector<Choice> choices;
  for (size_t i = 0; i + kChoiceNumbers <= numbers.size(); i += kChoiceNumbers) {
    ChoiceNumbers own;
    std::copy_n(numbers.begin() + i, kChoiceNumbers, own.begin());
    choices.push_back(ChoiceOf(own));
  }
  return choices;
}

bool AreAligned(const Buffers& b) {
  return IsAligned(b.lhs) && IsAligned(b.scale) && IsAligned(b.zero) && IsAligned(b.packed) &&
         IsAligned(b.out);
}

// microseconds[i] = median time of the product with choices[i]. Results: out, microseconds, workspace.
ffi::Error ExecuteTimes(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary dictionary) {
  Call call(args, rets, dictionary);
  return Guard(call.attributes.caller(), [&] {
    const auto calls = call.attributes.Get<int64_t>("calls");
    const auto choices = call.attributes.Get<ffi::Span<const int64_t>>("choices");
    int ordinal = 0;
    Target target;
    ffi::Error error = call.Decode();
    if (error.success() && (call.products.size() != 1 || rets.size() != 3)) {
      error = InvalidArgument("what is timed is one product with 3 results.");
    }
    if (error.failure()) return error;
    const cudaError_t status = FindTarget(stream, false, &ordinal, &target);
    if (status != cudaSuccess) return TargetError(status, ordinal);
    const Operands& operands = call.operands[0];
    auto microseconds = rets.get<ffi::Buffer<ffi::F32>>(1);
    auto workspace = rets.get<ffi::Buffer<ffi::U8>>(2);
    if (microseconds.has_error()) return microseconds.error();
    if (workspace.has_error()) return workspace.error();
    ffi::Buffer<ffi::F32> results = **microseconds;
    const auto workspace_bytes = static_cast<int64_t>((**workspace).element_count());
    QuantizedMatmul problem = operands.problem;
    std::vector<Buffers> buffers = CallsOf(operands, (**workspace).untyped_data());
    if (calls < 1 || calls > static_cast<int64_t>(buffers.size())) {
      return InvalidArgument("calls is " + std::to_string(calls) + " but must be from 1 to the " +
                             std::to_string(buffers.size()) + " matrices of packed.");
    }
    buffers.resize(calls);
    problem.num_weights = 1;
    const std::vector<Choice> decoded = DecodeChoices(choices);
    if (decoded.size() * kChoiceNumbers != choices.size() ||
        decoded.size() != results.element_count()) {
      return InvalidArgument("choices holds " + std::to_string(choices.size()) +
                             " numbers but needs " + std::to_string(kChoiceNumbers) +
                             " for each of the " + std::to_string(results.element_count()) +
                             " results.");
    }
    if (!AreAligned(operands.buffers)) {
      return InvalidArgument("what is timed must begin at multiples of 16 bytes.");
    }
    for (const Choice& choice : decoded) {
      const Support support = Supports(choice, problem, *target.device, workspace_bytes);
      if (!support) return InvalidArgument("a choice cannot be timed: " + support.reason + ".");
    }
    std::vector<float> times;
    const std::string what = "timing " + Describe(problem, ordinal);
    // Earlier kernels in the stream write the operands.
    error = ToError(cudaStreamSynchronize(stream), what);
    if (error.failure()) return error;
    error = ToError(TimeChoices(problem, buffers, decoded, ordinal, &times), what);
    if (error.failure()) return error;
    error = ToError(cudaMemcpyAsync(results.typed_data(), times.data(),
                                    times.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
                    what);
    if (error.failure()) return error;
    return ToError(cudaStreamSynchronize(stream), what);
  });
}

// Execute loads the kernels that it times.
ffi::Error InitializeTimes(cudaStream_t stream) {
  return Guard("jaxlowbit.tune", [&] {
    int ordinal = 0;
    Target target;
    const cudaError_t status = FindTarget(stream, true, &ordinal, &target);
    return status == cudaSuccess ? ffi::Error::Success() : TargetError(status, ordinal);
  });
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaTimesInitialize, jaxlowbit::InitializeTimes,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaTimesExecute, jaxlowbit::ExecuteTimes,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
