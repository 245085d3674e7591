// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of a product with an epilogue. Its operands are those of operands.h, then
//
//   5 bias      B[b, n], gated B[2 b, n], or B[0]: none   B: the type of lhs, or f32
//   6 residual  R[b, m, n], or R[0]: none                 R: the type of lhs, or f32
#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <string_view>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// Null where there is none: B[0].
ffi::Error DecodeAddend(const std::string& name, ffi::AnyBuffer buffer,
                        std::initializer_list<int64_t> shape, const std::string& rule,
                        ElementType lhs, ElementType* type, const void** data) {
  if (HasShape(buffer, {0})) return ffi::Error::Success();
  const auto found = FloatType(buffer.element_type());
  ffi::Error error = CheckType(name, buffer, found && (found == lhs || found == ElementType::kF32),
                               "f32 or the type of lhs");
  if (error.success()) error = CheckShape(name, buffer, shape, "[0] or " + rule);
  if (error.failure()) return error;
  *type = *found;
  *data = buffer.untyped_data();
  return error;
}

ffi::Error ExecuteFused(cudaStream_t stream, int32_t device, ffi::AnyBuffer lhs,
                        ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                        ffi::AnyBuffer index, ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                        ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::Buffer<ffi::U8>> workspace, int64_t bits,
                        int64_t group_size, std::string_view activation, bool gated,
                        bool half_sums) {
  const std::optional<Activation> function = FindActivation(activation);
  if (!function) return Refuse("activation is unknown: " + std::string(activation) + ".");
  Attributes attributes = {bits, group_size};
  attributes.half_sums = half_sums;
  attributes.gated = gated;
  Operands operands;
  ffi::Error error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, attributes, &operands);
  if (error.failure()) return error;
  QuantizedMatmul& p = operands.problem;
  p.epilogue.activation = *function;
  error = DecodeAddend("bias", bias, {p.batch * p.weights_per_element(), p.n},
                       gated ? "[2 * batch, n]" : "[batch, n]", p.lhs, &p.epilogue.bias,
                       &operands.buffers.bias);
  if (error.success()) {
    error = DecodeAddend("residual", residual, {p.batch, p.m, p.n}, "[batch, m, n]", p.lhs,
                         &p.epilogue.residual, &operands.buffers.residual);
  }
  return error.failure() ? error : Enqueue(operands, *workspace, device, stream);
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaFusedExecute, jaxlowbit::ExecuteFused,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()             // lhs
                                  .Arg<xla::ffi::AnyBuffer>()             // packed
                                  .Arg<xla::ffi::AnyBuffer>()             // scale
                                  .Arg<xla::ffi::AnyBuffer>()             // zero
                                  .Arg<xla::ffi::AnyBuffer>()             // index
                                  .Arg<xla::ffi::AnyBuffer>()             // bias
                                  .Arg<xla::ffi::AnyBuffer>()             // residual
                                  .Ret<xla::ffi::AnyBuffer>()             // out
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("half_sums"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
