// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of products of normalized rows, which tensor-parallel blocks are made of: the normalization follows
// an all-reduce, and the products end before the next. All kernels but the first use PDL
// (cuda/kernels/launch_config.h).
//
//   sum    = residual + addend
//   normed = rms_norm(sum) * norm
//   outs   = normed @ each of the weights, or (activation(normed @ gate) * (normed @ up)) @ down
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <vector>

#include "cuda/limits.h"
#include "cuda/ops/rms_norm.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

constexpr size_t kPerWeight = 4;  // packed, scale, zero, index

struct Rows {
  ffi::AnyBuffer residual, addend, norm, sum, normed;
};

ffi::Error CheckRows(const Rows& rows, const QuantizedMatmul& p) {
  const auto is_rows = [&](const std::string& name, ffi::AnyBuffer buffer) {
    return CheckShape(name, buffer, {1, p.m, p.k}, "[1, m, k]");
  };
  const auto has_type = [&](const std::string& name, ffi::AnyBuffer buffer, bool wide) {
    const auto type = FloatType(buffer.element_type());
    return CheckType(name, buffer, type == p.lhs || (wide && type == ElementType::kF32),
                     wide ? "f32 or the type of residual" : "the type of residual");
  };
  if (p.k % 8 != 0 || p.k > kMaxRmsNormColumns) {
    return Refuse("rows are normalized that have " + std::to_string(p.k) +
                  " elements, but it must be a multiple of 8 up to " +
                  std::to_string(kMaxRmsNormColumns) + ".");
  }
  for (const ffi::Error& error :
       {is_rows("residual", rows.residual), is_rows("addend", rows.addend),
        is_rows("sum", rows.sum), CheckShape("norm", rows.norm, {p.k}, "[k]"),
        has_type("residual", rows.residual, false), has_type("sum", rows.sum, false),
        has_type("addend", rows.addend, true), has_type("norm", rows.norm, true)}) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

// The sum may lie exactly over residual, and over nothing else that is read.
ffi::Error CheckApart(const Rows& rows, const std::vector<Operands>& products) {
  const Extent sum = ExtentOf(rows.sum), residual = ExtentOf(rows.residual);
  bool overlaps = sum.data != residual.data && Overlap(sum, residual);
  overlaps |= Overlap(sum, ExtentOf(rows.addend)) || Overlap(sum, ExtentOf(rows.norm));
  for (const auto& [problem, own] : products) {
    const Extent out = OutExtent(problem, own);
    for (ffi::AnyBuffer read : {rows.residual, rows.addend, rows.norm}) {
      overlaps |= Overlap(out, ExtentOf(read));
    }
  }
  if (!overlaps) return ffi::Error::Success();
  return Refuse(
      "a result lies over an operand of the call; put jax.lax.optimization_barrier around the "
      "result.");
}

// Operands after residual, addend and norm: the weights. Results after sum, normed and the workspace: the products, or
// for an MLP hidden, of its gate and up, and its product.
template <Stage kStage>
ffi::Error Normalized(cudaStream_t stream, ffi::AnyBuffer residual, ffi::AnyBuffer addend,
                      ffi::AnyBuffer norm, ffi::RemainingArgs weights,
                      ffi::Result<ffi::AnyBuffer> sum, ffi::Result<ffi::AnyBuffer> normed,
                      ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::RemainingRets outs,
                      ffi::Dictionary dictionary) {
  return Guard("normalized products", [&] {
    Attributes attributes(dictionary);
    const auto bits = attributes.Get<ffi::Span<const int64_t>>("bits");
    const auto group_size = attributes.Get<ffi::Span<const int64_t>>("group_size");
    const auto codebooks = Codebooks::Of(&attributes);
    const auto name = attributes.Get<std::string_view>("activation");
    const bool mlp = attributes.Get<bool>("mlp");
    const auto epsilon = attributes.Get<float>("epsilon");
    const Rows rows = {residual, addend, norm, *sum, *normed};
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = place.Find(stream);
    const size_t count = outs.size();
    if (error.success() && (count == 0 || (mlp && count != 2) || bits.size() != count ||
                            group_size.size() != count || weights.size() != kPerWeight * count)) {
      error = Refuse(std::to_string(weights.size()) + " operands of weights, " +
                     std::to_string(count) + " results, " + std::to_string(bits.size()) +
                     " bits and " + std::to_string(group_size.size()) +
                     " group sizes came, but each weight has 4, 1, 1 and 1.");
    }
    if (error.success()) error = codebooks.Check(count);
    std::vector<Operands> products(error.success() ? count : 0);
    for (size_t i = 0; error.success() && i < count; ++i) {
      const auto operand = [&](size_t j) {
        return weights.get<ffi::AnyBuffer>(kPerWeight * i + j).value();
      };
      const auto out = [&](size_t j) { return *outs.get<ffi::AnyBuffer>(j).value(); };
      ProductAttributes product = {bits[i], group_size[i]};
      product.gated = mlp && i == 0;
      product.codebook = codebooks.Own(i);
      error = DecodeOperands(mlp && i == 1 ? out(0) : rows.normed,
                             {operand(0), operand(1), operand(2), operand(3)}, out(i), product,
                             &products[i]);
      products[i].problem.pdl = true;
      if (error.success()) error = CheckSupported(products[i].problem, place.device);
    }
    Activation activation;
    if (error.success() && mlp) error = DecodeActivation(name, &activation);
    if (error.success()) error = CheckRows(rows, products[0].problem);
    if (error.failure() || products[0].problem.m == 0) return error;
    if (mlp) products[0].problem.epilogue.activation = activation;

    const QuantizedMatmul& p = products[0].problem;
    if (kStage == Stage::kExecute) {
      error = CheckApart(rows, products);
      if (error.failure()) return error;
      const RmsNorm normalization = {p.lhs,
                                     *FloatType(norm.element_type()),
                                     *FloatType(addend.element_type()),
                                     p.m,
                                     p.k,
                                     residual.untyped_data(),
                                     addend.untyped_data(),
                                     norm.untyped_data(),
                                     rows.sum.untyped_data(),
                                     rows.normed.untyped_data(),
                                     epsilon};
      error = ToError(LaunchRmsNorm(normalization, DeviceInfo(place.device), stream),
                      "launching the normalization");
      if (error.failure()) return error;
    }
    const Workspace room(*workspace);
    if (!mlp) return Enqueue(products, room, place);
    error = Enqueue({products[0]}, room, place);
    return error.failure() ? error : Enqueue({products[1]}, room, place);
  });
}

template <ffi::ExecutionStage kStage>
auto BindNormalized() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // residual
      .template Arg<ffi::AnyBuffer>()        // addend
      .template Arg<ffi::AnyBuffer>()        // norm
      .RemainingArgs()                       // weights
      .template Ret<ffi::AnyBuffer>()        // sum
      .template Ret<ffi::AnyBuffer>()        // normed
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .RemainingRets()                       // products
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaNormalizedInitialize,
                              jaxlowbit::Normalized<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindNormalized<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaNormalizedExecute,
                              jaxlowbit::Normalized<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindNormalized<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
