// SPDX-License-Identifier: Apache-2.0
//
// CUDA handlers of several products. Every kernel but a call's first starts early, which survives
// graph capture only inside of one handler (cuda/early_start.h): nothing here writes a weight, and
// what the kernels before the call wrote is there when the first one starts.
#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

constexpr size_t kPerWeight = 4;  // packed, scale, zero, index

// out[i] = lhs @ weight i.
ffi::Error ExecuteMatmuls(cudaStream_t stream, int32_t device, ffi::AnyBuffer lhs,
                          ffi::RemainingArgs weights, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                          ffi::RemainingRets outs, int64_t bits, int64_t group_size,
                          bool half_sums) {
  if (weights.size() != kPerWeight * outs.size()) {
    return Refuse(std::to_string(weights.size()) + " operands follow lhs but " +
                  std::to_string(outs.size()) + " results need 4 each.");
  }
  Attributes attributes = {bits, group_size};
  attributes.half_sums = half_sums;
  std::vector<Operands> products(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const auto operand = [&](size_t j) {
      return weights.get<ffi::AnyBuffer>(kPerWeight * i + j).value();
    };
    const ffi::Error error =
        DecodeOperands(lhs, {operand(0), operand(1), operand(2), operand(3)},
                       *outs.get<ffi::AnyBuffer>(i).value(), attributes, &products[i]);
    if (error.failure()) return error;
  }
  return EnqueueAll(products, *workspace, device, stream);
}

// hidden = activation(lhs @ gate) * (lhs @ up), of the two weights of gate_up; out = hidden @ down.
ffi::Error ExecuteMlp(cudaStream_t stream, int32_t device, ffi::AnyBuffer lhs,
                      ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                      ffi::AnyBuffer index, ffi::AnyBuffer down_packed, ffi::AnyBuffer down_scale,
                      ffi::AnyBuffer down_zero, ffi::AnyBuffer down_index,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> hidden,
                      ffi::Result<ffi::Buffer<ffi::U8>> workspace, int64_t bits, int64_t group_size,
                      int64_t down_bits, int64_t down_group_size, std::string_view activation,
                      bool half_sums) {
  const std::optional<Activation> function = FindActivation(activation);
  if (!function) return Refuse("activation is unknown: " + std::string(activation) + ".");
  Attributes attributes = {bits, group_size}, down_attributes = {down_bits, down_group_size};
  attributes.half_sums = down_attributes.half_sums = half_sums;
  attributes.gated = true;
  Operands up, down;
  ffi::Error error = DecodeOperands(lhs, {packed, scale, zero, index}, *hidden, attributes, &up);
  if (error.success()) {
    error = DecodeOperands(*hidden, {down_packed, down_scale, down_zero, down_index}, *out,
                           down_attributes, &down);
  }
  if (error.failure()) return error;
  error = CheckType("hidden", *hidden, up.problem.out == up.problem.lhs, "the type of lhs");
  if (error.failure()) return error;
  up.problem.epilogue.activation = *function;
  error = Enqueue(up, *workspace, device, stream);
  if (error.failure()) return error;
  down.problem.early_start = true;
  return Enqueue(down, *workspace, device, stream);
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaMatmulsExecute, jaxlowbit::ExecuteMatmuls,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()             // lhs
                                  .RemainingArgs()                        // weights
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .RemainingRets()                        // outs
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size")
                                  .Attr<bool>("half_sums"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaMlpExecute, jaxlowbit::ExecuteMlp,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()             // lhs
                                  .Arg<xla::ffi::AnyBuffer>()             // gate_up: packed
                                  .Arg<xla::ffi::AnyBuffer>()             // scale
                                  .Arg<xla::ffi::AnyBuffer>()             // zero
                                  .Arg<xla::ffi::AnyBuffer>()             // index
                                  .Arg<xla::ffi::AnyBuffer>()             // down: packed
                                  .Arg<xla::ffi::AnyBuffer>()             // scale
                                  .Arg<xla::ffi::AnyBuffer>()             // zero
                                  .Arg<xla::ffi::AnyBuffer>()             // index
                                  .Ret<xla::ffi::AnyBuffer>()             // out
                                  .Ret<xla::ffi::AnyBuffer>()             // hidden
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("down_bits")
                                  .Attr<int64_t>("down_group_size")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("half_sums"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
