// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of a product with an epilogue. Its operands are those of operands.h, then
//
//   5 bias      B[b, n], gated B[2 b, n], or B[0]: none   B: the type of lhs, or f32
//   6 residual  R[b, m, n], or R[0]: none                 R: the type of lhs, or f32
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// Decodes a bias or a residual; `data` stays null for an empty one.
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

template <Stage kStage>
ffi::Error Fused(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                 ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                 ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> out,
                 ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Dictionary dictionary) {
  Attributes attributes(dictionary);
  auto product = ProductAttributes::OfFormat(&attributes);
  product.half_sums = attributes.Get<bool>("half_sums");
  product.gated = attributes.Get<bool>("gated");
  const auto activation = attributes.Get<std::string_view>("activation");
  return Guard(product.gated ? "quantized_glu" : "quantized_matmul", [&] {
    Operands operands;
    QuantizedMatmul& p = operands.problem;
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = DecodeActivation(activation, &p.epilogue.activation);
    if (error.success()) error = place.Find(stream);
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    if (error.success()) {
      error = DecodeAddend("bias", bias, {p.batch * p.weights_per_element(), p.n},
                           product.gated ? "[2 * batch, n]" : "[batch, n]", p.lhs, &p.epilogue.bias,
                           &operands.buffers.bias);
    }
    if (error.success()) {
      error = DecodeAddend("residual", residual, {p.batch, p.m, p.n}, "[batch, m, n]", p.lhs,
                           &p.epilogue.residual, &operands.buffers.residual);
    }
    return error.failure() ? error : Enqueue({operands}, Workspace(*workspace), place);
  });
}

template <ffi::ExecutionStage kStage>
auto BindFused() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // lhs
      .template Arg<ffi::AnyBuffer>()        // packed
      .template Arg<ffi::AnyBuffer>()        // scale
      .template Arg<ffi::AnyBuffer>()        // zero
      .template Arg<ffi::AnyBuffer>()        // index
      .template Arg<ffi::AnyBuffer>()        // bias
      .template Arg<ffi::AnyBuffer>()        // residual
      .template Ret<ffi::AnyBuffer>()        // out
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaFusedInitialize,
                              jaxlowbit::Fused<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindFused<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaFusedExecute,
                              jaxlowbit::Fused<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindFused<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
