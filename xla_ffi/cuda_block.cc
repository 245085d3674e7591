// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of what lies between two attentions of a transformer: five kernels or more, all but the first under
// PDL (cuda/kernels/launch_config.h). Operands and results are those of block_operands.h.
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/ops/rms_norm.h"
#include "xla_ffi/block_operands.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

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
    for (size_t i = 1; i < products.size(); ++i) products[i].problem.pdl = true;
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
