// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of what lies between two attentions of a transformer: five kernels or more, all of
// which but the first start early (cuda/early_start.h).
//
//   sum       = residual + attended @ out
//   hidden    = activation(gate) * up of rms_norm(sum) * norm
//   result    = sum + hidden @ down
//   following = rms_norm(result) * following_norm @ each of the following weights
#include <cuda_runtime_api.h>

#include <optional>
#include <string_view>
#include <vector>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// Operands of a weight: packed, scale, zero, index. Weights: out, gate_up, down, then the following.
constexpr size_t kPerWeight = 4, kWeights = 3;

ffi::Error ExecuteBlock(cudaStream_t stream, int32_t device, ffi::AnyBuffer attended,
                        ffi::AnyBuffer residual, ffi::AnyBuffer norm, ffi::AnyBuffer following_norm,
                        ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> result,
                        ffi::Result<ffi::AnyBuffer> projected, ffi::Result<ffi::AnyBuffer> sum,
                        ffi::Result<ffi::AnyBuffer> normed, ffi::Result<ffi::AnyBuffer> hidden,
                        ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::RemainingRets following,
                        ffi::Span<const int64_t> bits, ffi::Span<const int64_t> group_size,
                        std::string_view activation, float epsilon) {
  const size_t count = kWeights + following.size();
  if (weights.size() != kPerWeight * count || bits.size() != count || group_size.size() != count) {
    return Refuse("a block with " + std::to_string(following.size()) + " following products has " +
                  std::to_string(count) + " weights of 4 operands, but " +
                  std::to_string(weights.size()) + " operands, " + std::to_string(bits.size()) +
                  " bits and " + std::to_string(group_size.size()) + " group sizes came.");
  }
  const std::optional<Activation> function = FindActivation(activation);
  if (!function) return Refuse("activation is unknown: " + std::string(activation) + ".");

  const auto reads_normed = [](size_t i) { return i == 1 || i >= kWeights; };
  std::vector<Operands> products(count);
  Operands &out = products[0], &up = products[1], &down = products[2];
  for (size_t i = 0; i < count; ++i) {
    const auto operand = [&](size_t j) {
      return weights.get<ffi::AnyBuffer>(kPerWeight * i + j).value();
    };
    Attributes attributes = {bits[i], group_size[i]};
    attributes.gated = i == 1;
    const ffi::AnyBuffer lhs = reads_normed(i) ? *normed : i == 0 ? attended : *hidden;
    const ffi::AnyBuffer written = i == 1 ? *hidden
                                   : i < kWeights
                                       ? *projected
                                       : *following.get<ffi::AnyBuffer>(i - kWeights).value();
    const ffi::Error error = DecodeOperands(lhs, {operand(0), operand(1), operand(2), operand(3)},
                                            written, attributes, &products[i]);
    if (error.failure()) return error;
    products[i].problem.early_start = i > 0;
  }
  const QuantizedMatmul& p = out.problem;
  const auto is_rows = [&](const std::string& name, ffi::AnyBuffer rows) {
    const ffi::Error error = CheckShape(name, rows, {1, p.m, p.n}, "[1, m, n]");
    return error.failure() ? error
                           : CheckType(name, rows, FloatType(rows.element_type()) == p.lhs,
                                       "the type of attended");
  };
  const auto is_scales = [&](const std::string& name, ffi::AnyBuffer scales) {
    const ffi::Error error = CheckShape(name, scales, {p.n}, "[n]");
    return error.failure() ? error
                           : CheckType(name, scales, FloatType(scales.element_type()) == p.lhs,
                                       "the type of attended");
  };
  if (p.n % 8 != 0 || p.n > kMaxRmsNormColumns) {
    return Refuse("rows are normalized that have " + std::to_string(p.n) +
                  " elements, but it must be a multiple of 8 up to " +
                  std::to_string(kMaxRmsNormColumns) + ".");
  }
  for (const ffi::Error& error :
       {is_rows("residual", residual), is_rows("projected", *projected), is_rows("sum", *sum),
        is_rows("normed", *normed), is_rows("result", *result), is_scales("norm", norm),
        CheckType("hidden", *hidden, down.problem.lhs == p.lhs, "the type of attended"),
        following.size() == 0 ? ffi::Error::Success()
                              : is_scales("following_norm", following_norm)}) {
    if (error.failure()) return error;
  }
  if (p.m == 0) return ffi::Error::Success();
  up.problem.epilogue.activation = *function;

  for (const Operands& product : products) {
    const ffi::Error error = CheckSupported(product.problem, device);
    if (error.failure()) return error;
  }

  const void* following_scales = following.size() == 0 ? nullptr : following_norm.untyped_data();
  const auto normalize = [&](ffi::AnyBuffer x, ffi::AnyBuffer total, const void* scales) {
    return ToError(LaunchRmsNorm({p.lhs, p.m, p.n, x.untyped_data(), projected->untyped_data(),
                                  scales, total.untyped_data(), normed->untyped_data(), epsilon},
                                 device, stream),
                   "launching the normalization");
  };
  ffi::Error error = ffi::Error::Success();
  for (size_t i = 0; error.success() && i < kWeights; ++i) {
    error = Enqueue(products[i], *workspace, device, stream);
    if (error.success() && i == 0) error = normalize(residual, *sum, norm.untyped_data());
    if (error.success() && i == 2) error = normalize(*sum, *result, following_scales);
  }
  if (error.failure()) return error;
  return EnqueueAll({products.begin() + kWeights, products.end()}, *workspace, device, stream);
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaBlockExecute, jaxlowbit::ExecuteBlock,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()             // attended
                                  .Arg<xla::ffi::AnyBuffer>()             // residual
                                  .Arg<xla::ffi::AnyBuffer>()             // norm
                                  .Arg<xla::ffi::AnyBuffer>()             // following_norm
                                  .RemainingArgs()                        // weights
                                  .Ret<xla::ffi::AnyBuffer>()             // result
                                  .Ret<xla::ffi::AnyBuffer>()             // projected
                                  .Ret<xla::ffi::AnyBuffer>()             // sum
                                  .Ret<xla::ffi::AnyBuffer>()             // normed
                                  .Ret<xla::ffi::AnyBuffer>()             // hidden
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .RemainingRets()                        // following
                                  .Attr<xla::ffi::Span<const int64_t>>("bits")
                                  .Attr<xla::ffi::Span<const int64_t>>("group_size")
                                  .Attr<std::string_view>("activation")
                                  .Attr<float>("epsilon"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
