// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of a product of quantized activations. Its operands are those of operands.h, but for
//
//   0 lhs        T[b, m, k], interleaved (Buffers in cuda/problem.h)   T: s8 or f8e4m3fn
//   1 lhs_scale  f32[b, m]: those of the rows of lhs
//
// which the others follow, then
//
//   6 channel_scale  f32[L, n_blocks, 64], in order, beside s8 scales; otherwise f32[0]
//
// and results are of bf16 or f32. No kernel stands in where buffers begin at odd places, so
// weights there are refused.
#include <cuda_runtime_api.h>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

ffi::Error CheckFloats(std::string_view name, const ffi::AnyBuffer& buffer) {
  return CheckType(name, buffer, buffer.element_type() == ffi::DataType::F32, "f32");
}

template <Stage kStage>
ffi::Error Activations(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                       ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                       ffi::AnyBuffer index, ffi::AnyBuffer channel_scale,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                       ffi::Dictionary dictionary) {
  return Guard("quantized_matmul", [&] {
    Attributes attributes(dictionary);
    auto product = ProductAttributes::OfFormat(&attributes);
    product.quantized_lhs = true;
    Operands operands;
    const QuantizedMatmul& p = operands.problem;
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    if (error.success()) {
      error = CheckFloats("lhs_scale", lhs_scale);
    }
    if (error.success()) {
      error = CheckShape("lhs_scale", lhs_scale, {p.batch, p.m}, "[batch, m]");
    }
    if (error.success()) error = CheckFloats("channel_scale", channel_scale);
    const bool scales_channels = p.scale == ElementType::kInt8;
    if (error.success() && scales_channels) {
      error = CheckShape("channel_scale", channel_scale, {p.num_weights, p.n_blocks(), kAtom},
                         "[weights, n_blocks, 64]");
    }
    if (error.failure()) return error;
    operands.buffers.lhs_scale = static_cast<const float*>(lhs_scale.untyped_data());
    if (scales_channels) {
      operands.buffers.channel_scale = static_cast<const float*>(channel_scale.untyped_data());
    }
    if (const Support support = Supports(Kernel::kQmmSm90, p, DeviceInfo(place.device)); !support) {
      return Refuse(support.reason + "; use another backend.");
    }
    const bool aligned = IsAligned(operands.buffers.packed) && IsAligned(operands.buffers.scale);
    if (kStage == Stage::kExecute && !aligned) {
      return Refuse(
          "weights beside quantized activations must begin at multiples of 16 bytes; put "
          "jax.lax.optimization_barrier around them.");
    }
    return Enqueue({operands}, Workspace(*workspace), place);
  });
}

template <ffi::ExecutionStage kStage>
auto BindActivations() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // lhs
      .template Arg<ffi::AnyBuffer>()        // lhs_scale
      .template Arg<ffi::AnyBuffer>()        // packed
      .template Arg<ffi::AnyBuffer>()        // scale
      .template Arg<ffi::AnyBuffer>()        // zero
      .template Arg<ffi::AnyBuffer>()        // index
      .template Arg<ffi::AnyBuffer>()        // channel_scale
      .template Ret<ffi::AnyBuffer>()        // out
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaActivationsInitialize,
                              jaxlowbit::Activations<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindActivations<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaActivationsExecute,
                              jaxlowbit::Activations<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindActivations<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
