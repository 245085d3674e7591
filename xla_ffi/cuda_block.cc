// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of what lies between two attentions of a transformer: five kernels or more, all but the first under
// PDL (cuda/kernels/launch_config.h).
//
//   sum       = residual + attended @ out
//   hidden    = activation(gate) * up of rms_norm(sum) * norm
//   result    = sum + hidden @ down
//   following = rms_norm(result) * following_norm @ each of the following weights
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/limits.h"
#include "cuda/ops/rms_norm.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

// Operands of a weight: packed, scale, zero, index. Weights: out, gate_up, down, then the following.
constexpr size_t kPerWeight = 4, kWeights = 3;

struct BlockBuffers {
  ffi::AnyBuffer attended, residual, norm, following_norm;
  ffi::AnyBuffer result, projected, sum, normed, hidden;
};

// The products, in order: out, up, down, then the following.
ffi::Error DecodeProducts(const BlockBuffers& buffers, ffi::RemainingArgs weights,
                          ffi::RemainingRets following, ffi::Span<const int64_t> bits,
                          ffi::Span<const int64_t> group_size, std::vector<Operands>* products) {
  const size_t count = kWeights + following.size();
  if (weights.size() != kPerWeight * count || bits.size() != count || group_size.size() != count) {
    return Refuse("a block with " + std::to_string(following.size()) + " following products has " +
                  std::to_string(count) + " weights of 4 operands, but " +
                  std::to_string(weights.size()) + " operands, " + std::to_string(bits.size()) +
                  " bits and " + std::to_string(group_size.size()) + " group sizes came.");
  }
  products->resize(count);
  for (size_t i = 0; i < count; ++i) {
    const auto operand = [&](size_t j) {
      return weights.get<ffi::AnyBuffer>(kPerWeight * i + j).value();
    };
    ProductAttributes attributes = {bits[i], group_size[i]};
    attributes.gated = i == 1;
    const bool reads_normed = i == 1 || i >= kWeights;
    const ffi::AnyBuffer lhs = reads_normed ? buffers.normed
                               : i == 0     ? buffers.attended
                                            : buffers.hidden;
    const ffi::AnyBuffer written = i == 1 ? buffers.hidden
                                   : i < kWeights
                                       ? buffers.projected
                                       : *following.get<ffi::AnyBuffer>(i - kWeights).value();
    const ffi::Error error = DecodeOperands(lhs, {operand(0), operand(1), operand(2), operand(3)},
                                            written, attributes, &(*products)[i]);
    if (error.failure()) return error;
    (*products)[i].problem.pdl = i > 0;
  }
  return ffi::Error::Success();
}

// `p`: the first product.
ffi::Error CheckRows(const BlockBuffers& buffers, bool follows, const QuantizedMatmul& p) {
  const auto has_type = [&](const std::string& name, ffi::AnyBuffer buffer) {
    return CheckType(name, buffer, FloatType(buffer.element_type()) == p.lhs,
                     "the type of attended");
  };
  const auto is_rows = [&](const std::string& name, ffi::AnyBuffer rows) {
    const ffi::Error error = CheckShape(name, rows, {1, p.m, p.n}, "[1, m, n]");
    return error.failure() ? error : has_type(name, rows);
  };
  const auto is_scales = [&](const std::string& name, ffi::AnyBuffer scales) {
    const ffi::Error error = CheckShape(name, scales, {p.n}, "[n]");
    return error.failure() ? error : has_type(name, scales);
  };
  if (p.n % 8 != 0 || p.n > kMaxRmsNormColumns) {
    return Refuse("rows are normalized that have " + std::to_string(p.n) +
                  " elements, but it must be a multiple of 8 up to " +
                  std::to_string(kMaxRmsNormColumns) + ".");
  }
  for (const ffi::Error& error :
       {is_rows("residual", buffers.residual), is_rows("projected", buffers.projected),
        is_rows("sum", buffers.sum), is_rows("normed", buffers.normed),
        is_rows("result", buffers.result), is_scales("norm", buffers.norm),
        has_type("hidden", buffers.hidden),
        follows ? is_scales("following_norm", buffers.following_norm) : ffi::Error::Success()}) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

Extent ExtentOf(ffi::AnyBuffer buffer) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
}

// Redirects to the workspace what a block writes over something that is read later: the result and the following
// products are written while kernels still read operands of those products. Everything else has been read by then.
ffi::Error RedirectResults(const BlockBuffers& buffers, std::vector<Operands>* products,
                           Placement* placement, void** result) {
  std::vector<Extent> read = {ExtentOf(buffers.following_norm)};
  std::vector<std::pair<void**, Extent>> written = {{result, ExtentOf(buffers.result)}};
  for (size_t i = kWeights; i < products->size(); ++i) {
    auto& [problem, own] = (*products)[i];
    for (const Extent& operand : OperandExtents(problem, own)) read.push_back(operand);
    written.push_back({&own.out, OutExtent(problem, own)});
  }
  for (auto& [data, extent] : written) {
    bool overlaps = false;
    for (const Extent& other : read) overlaps |= Overlap(extent, other);
    for (const auto& [_, other] : written) {
      overlaps |= other.data != extent.data && Overlap(extent, other);
    }
    if (!overlaps) continue;
    void* place = placement->Redirect(*data, extent.bytes);
    if (place == nullptr) return CheckRoom(extent.bytes, placement->bytes());
    *data = place;
  }
  return ffi::Error::Success();
}

ffi::Error LoadBlock(const std::vector<Operands>& products, ffi::Buffer<ffi::U8> workspace,
                     const Place& place) {
  const std::pair<size_t, size_t> ranges[] = {{0, 1}, {1, 2}, {2, 3}, {kWeights, products.size()}};
  for (const auto& [begin, end] : ranges) {
    const ffi::Error error =
        Enqueue({products.begin() + begin, products.begin() + end}, Workspace(workspace), place);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error EnqueueBlock(const BlockBuffers& buffers, std::vector<Operands> products,
                        ffi::Buffer<ffi::U8> workspace, float epsilon, const Place& place) {
  const QuantizedMatmul& p = products[0].problem;
  if (place.stage == Stage::kInitialize) return LoadBlock(products, workspace, place);
  const auto bytes = static_cast<int64_t>(workspace.element_count());
  Placement placement(workspace.untyped_data(), bytes, place.stream);
  void* result = buffers.result.untyped_data();
  ffi::Error error = RedirectResults(buffers, &products, &placement, &result);

  const bool follows = products.size() > kWeights;
  const void* following_scales = follows ? buffers.following_norm.untyped_data() : nullptr;
  const auto multiply = [&](size_t begin, size_t end) {
    return Enqueue({products.begin() + begin, products.begin() + end},
                   {placement.workspace(), placement.bytes()}, place);
  };
  const auto normalize = [&](const void* x, void* total, const void* scales) {
    return ToError(LaunchRmsNorm({p.lhs, p.m, p.n, x, buffers.projected.untyped_data(), scales,
                                  total, buffers.normed.untyped_data(), epsilon},
                                 DeviceInfo(place.device), place.stream),
                   "launching the normalization");
  };
  void* sum = buffers.sum.untyped_data();
  if (error.success()) error = multiply(0, 1);
  if (error.success()) {
    error = normalize(buffers.residual.untyped_data(), sum, buffers.norm.untyped_data());
  }
  if (error.success()) error = multiply(1, 2);
  if (error.success()) error = multiply(2, 3);
  if (error.success()) error = normalize(sum, result, following_scales);
  if (error.success() && follows) error = multiply(kWeights, products.size());
  const ffi::Error finished = ToError(placement.Finish(), "copying results of a block");
  return error.failure() ? error : finished;
}

template <Stage kStage>
ffi::Error Block(cudaStream_t stream, ffi::AnyBuffer attended, ffi::AnyBuffer residual,
                 ffi::AnyBuffer norm, ffi::AnyBuffer following_norm, ffi::RemainingArgs weights,
                 ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> projected,
                 ffi::Result<ffi::AnyBuffer> sum, ffi::Result<ffi::AnyBuffer> normed,
                 ffi::Result<ffi::AnyBuffer> hidden, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                 ffi::RemainingRets following, ffi::Dictionary dictionary) {
  return Guard("quantized_block", [&] {
    Attributes attributes(dictionary);
    const auto bits = attributes.Get<ffi::Span<const int64_t>>("bits");
    const auto group_size = attributes.Get<ffi::Span<const int64_t>>("group_size");
    const auto name = attributes.Get<std::string_view>("activation");
    const auto epsilon = attributes.Get<float>("epsilon");
    const BlockBuffers buffers = {attended,   residual, norm,    following_norm, *result,
                                  *projected, *sum,     *normed, *hidden};
    std::vector<Operands> products;
    Activation activation;
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = DecodeActivation(name, &activation);
    if (error.success()) error = place.Find(stream);
    if (error.success()) {
      error = DecodeProducts(buffers, weights, following, bits, group_size, &products);
    }
    if (error.success()) error = CheckRows(buffers, following.size() > 0, products[0].problem);
    if (error.failure() || products[0].problem.m == 0) return error;
    products[1].problem.epilogue.activation = activation;
    for (Operands& product : products) {
      error = CheckSupported(product.problem, place.device);  // before anything is launched
      if (error.failure()) return error;
    }
    return EnqueueBlock(buffers, products, *workspace, epsilon, place);
  });
}

template <ffi::ExecutionStage kStage>
auto BindBlock() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // attended
      .template Arg<ffi::AnyBuffer>()        // residual
      .template Arg<ffi::AnyBuffer>()        // norm
      .template Arg<ffi::AnyBuffer>()        // following_norm
      .RemainingArgs()                       // weights
      .template Ret<ffi::AnyBuffer>()        // result
      .template Ret<ffi::AnyBuffer>()        // projected
      .template Ret<ffi::AnyBuffer>()        // sum
      .template Ret<ffi::AnyBuffer>()        // normed
      .template Ret<ffi::AnyBuffer>()        // hidden
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .RemainingRets()                       // following
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaBlockInitialize,
                              jaxlowbit::Block<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindBlock<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaBlockExecute,
                              jaxlowbit::Block<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindBlock<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
