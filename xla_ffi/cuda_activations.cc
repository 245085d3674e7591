// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers of a product of quantized activations. The operands of the target jaxlowbit_quantized_activations
// are those of operands.h, but for
//
//   0 lhs        T[b, m, k], interleaved (Buffers in cuda/problem.h)   T: s8 or f8e4m3fn
//   1 lhs_scale  as cuda_bytes.h has it
//
// which the others follow, then
//
//   6 channel_scale  likewise
//
// and results are of bf16 or f32, or, beside s8 lhs, sums of integers of s32, which no float scale multiplies.
//
// The target jaxlowbit_rounded_activations rounds activations before it multiplies them (cuda/ops/quantize_rows.h).
// In place of the first two operands it has
//
//   0 floats  F[b, m, columns], where k is columns or the next multiple of 16   F: f32, bf16 or f16
//   1 factor  f32[columns], by which columns are divided first; or f32[0]
//
// and lhs and lhs_scale are results, between out and the workspace: values of 8 bits, or, for few rows, the same values
// in bf16, in order, for qmm_sm90_stream. Nobody writes them where that kernel rounds rows itself. Attribute `float8`,
// bool: whether they are those of f8e4m3fn. Floats are read before out is written, so that they may overlap.
#include <cuda_runtime_api.h>

#include <optional>

#include "xla_ffi/cuda_bytes.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// What both targets have.
struct Product {
  ffi::AnyBuffer lhs, lhs_scale;
  WeightBuffers weight;
  ffi::AnyBuffer channel_scale, out;
};

// Decodes the attributes and what they describe, finds the place, and says why no kernel computes the product there.
ffi::Error Decode(const Product& product, Attributes attributes, cudaStream_t stream, Place* place,
                  Operands* operands) {
  auto decoded = ProductAttributes::OfFormat(&attributes);
  QuantizedMatmul& p = operands->problem;
  decoded.quantized_lhs = !p.scales_rows;
  ffi::Error error = attributes.Check();
  if (error.success()) error = place->Find(stream);
  if (error.success()) {
    error = DecodeOperands(product.lhs, product.weight, product.out, decoded, operands);
  }
  if (error.success() && p.scales_rows) {
    error = CheckType("rounded lhs", product.lhs, p.lhs == ElementType::kBf16, "8 bits or bf16");
  }
  if (error.failure()) return error;
  return AddScales(product.lhs_scale, product.channel_scale, *place, operands);
}

template <Stage kStage>
ffi::Error Activations(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                       ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                       ffi::AnyBuffer index, ffi::AnyBuffer channel_scale,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                       ffi::Dictionary dictionary) {
  return Guard("quantized_matmul", [&] {
    const Product product = {lhs, lhs_scale, {packed, scale, zero, index}, channel_scale, *out};
    Operands operands;
    Place place(kStage);
    const ffi::Error error = Decode(product, Attributes(dictionary), stream, &place, &operands);
    return error.failure() ? error : Enqueue({operands}, Workspace(*workspace), place);
  });
}

// Fills `rows`, or says which operand breaks which rule. `wide`: the kind of values that are stored in bf16.
ffi::Error DecodeRows(ffi::AnyBuffer floats, ffi::AnyBuffer factor, const Product& product,
                      const QuantizedMatmul& p, ElementType wide, QuantizeRows* rows) {
  const auto type = FloatType(floats.element_type());
  ffi::Error error = CheckType("lhs", floats, type.has_value(), "f32, bf16 or f16");
  if (error.success()) error = CheckRank("lhs", floats, 3, "[batch, m, columns]");
  if (error.success()) error = CheckFloats("factor", factor);
  if (error.failure()) return error;
  const int64_t columns = floats.dimensions()[2];
  error = CheckShape("lhs", floats, {p.batch, p.m, columns}, "[batch, m, columns]");
  const int64_t padded = CeilDiv(columns, kInterleavedColumns) * kInterleavedColumns;
  if (error.success()) {
    error = CheckShape("rounded lhs", product.lhs, {p.batch, p.m, padded},
                       "[batch, m, the next multiple of 16 columns]");
  }
  const bool divides = !HasShape(factor, {0});
  if (error.success() && divides) {
    error = CheckShape("factor", factor, {columns}, "[0] or [columns]");
  }
  if (error.failure()) return error;
  rows->from = *type;
  rows->to = p.scales_rows ? wide : p.lhs;
  rows->wide = p.scales_rows;
  rows->early = p.bits > 4;
  rows->rows = p.batch * p.m;
  rows->columns = columns;
  rows->floats = floats.untyped_data();
  rows->factor = divides ? static_cast<const float*>(factor.untyped_data()) : nullptr;
  rows->values = product.lhs.untyped_data();
  rows->scale = static_cast<float*>(product.lhs_scale.untyped_data());
  return error;
}

// The product that rounds its rows itself, where a kernel does. Execute may be given floats that begin anywhere or lie
// where results do, which two kernels read before any result is written.
std::optional<Operands> RoundingItself(const Operands& operands, const QuantizeRows& rows,
                                       const Place& place) {
  Operands own = operands;
  auto& [p, b] = own;
  const bool reads = p.scales_rows && rows.from == ElementType::kBf16 && rows.factor == nullptr &&
                     rows.columns == p.k;
  if (!reads) return std::nullopt;
  p.rounding = rows.to == ElementType::kE4m3 ? Rounding::kE4m3 : Rounding::kInt8;
  b.lhs = rows.floats;
  b.lhs_scale = nullptr;
  if (place.stage == Stage::kExecute &&
      (!IsAligned(b.lhs) || Overlap(LhsExtent(p, b), OutExtent(p, b)))) {
    return std::nullopt;
  }
  if (!SupportsCached(Kernel::kQmmSm90Stream, p, DeviceInfo(place.device))) return std::nullopt;
  return own;
}

template <Stage kStage>
ffi::Error Rounded(cudaStream_t stream, ffi::AnyBuffer floats, ffi::AnyBuffer factor,
                   ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                   ffi::AnyBuffer index, ffi::AnyBuffer channel_scale,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lhs,
                   ffi::Result<ffi::AnyBuffer> lhs_scale,
                   ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Dictionary dictionary) {
  return Guard("quantized_matmul", [&] {
    const Product product = {*lhs, *lhs_scale, {packed, scale, zero, index}, channel_scale, *out};
    Operands operands;
    QuantizeRows rows;
    Place place(kStage);
    Attributes attributes(dictionary);
    const ElementType wide =
        attributes.Get<bool>("float8") ? ElementType::kE4m3 : ElementType::kInt8;
    operands.problem.scales_rows = !QuantizedType((*lhs).element_type()).has_value();
    ffi::Error error = Decode(product, attributes, stream, &place, &operands);
    if (error.success()) error = DecodeRows(floats, factor, product, operands.problem, wide, &rows);
    if (error.success()) {
      const auto own = RoundingItself(operands, rows, place);
      if (own.has_value()) return Enqueue({*own}, Workspace(*workspace), place);
    }
    if (error.success() && kStage == Stage::kExecute) {
      error = ToError(LaunchQuantizeRows(rows, stream), "launching the rounding of activations");
    }
    if (error.failure()) return error;
    operands.problem.pdl = true;
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

template <ffi::ExecutionStage kStage>
auto BindRounded() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // floats
      .template Arg<ffi::AnyBuffer>()        // factor
      .template Arg<ffi::AnyBuffer>()        // packed
      .template Arg<ffi::AnyBuffer>()        // scale
      .template Arg<ffi::AnyBuffer>()        // zero
      .template Arg<ffi::AnyBuffer>()        // index
      .template Arg<ffi::AnyBuffer>()        // channel_scale
      .template Ret<ffi::AnyBuffer>()        // out
      .template Ret<ffi::AnyBuffer>()        // lhs
      .template Ret<ffi::AnyBuffer>()        // lhs_scale
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaRoundedInitialize,
                              jaxlowbit::Rounded<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindRounded<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaRoundedExecute,
                              jaxlowbit::Rounded<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindRounded<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
