// SPDX-License-Identifier: Apache-2.0
//
// CUDA handlers of several products. Every kernel but a call's first uses PDL, which survives graph capture only
// inside of one handler (cuda/kernels/launch_config.h): nothing here writes a weight, and what earlier kernels wrote
// is there when the first kernel of the call starts.
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

constexpr size_t kPerWeight = 4;  // packed, scale, zero, index

// out[i] = lhs @ weight i.
template <Stage kStage>
ffi::Error Matmuls(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::RemainingArgs weights,
                   ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::RemainingRets outs,
                   ffi::Dictionary dictionary) {
  return Guard("quantized_matmuls", [&] {
    Attributes attributes(dictionary);
    auto product = ProductAttributes::OfFormat(&attributes);
    product.half_sums = attributes.Get<bool>("half_sums");
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.success() && weights.size() != kPerWeight * outs.size()) {
      error = Refuse(std::to_string(weights.size()) + " operands follow lhs but " +
                     std::to_string(outs.size()) + " results need 4 each.");
    }
    std::vector<Operands> products(outs.size());
    for (size_t i = 0; error.success() && i < outs.size(); ++i) {
      const auto operand = [&](size_t j) {
        return weights.get<ffi::AnyBuffer>(kPerWeight * i + j).value();
      };
      error = DecodeOperands(lhs, {operand(0), operand(1), operand(2), operand(3)},
                             *outs.get<ffi::AnyBuffer>(i).value(), product, &products[i]);
    }
    return error.failure() ? error : Enqueue(products, Workspace(*workspace), place);
  });
}

// hidden = activation(lhs @ gate) * (lhs @ up), of the two weights of gate_up; out = hidden @ down.
template <Stage kStage>
ffi::Error Mlp(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer packed, ffi::AnyBuffer scale,
               ffi::AnyBuffer zero, ffi::AnyBuffer index, ffi::AnyBuffer down_packed,
               ffi::AnyBuffer down_scale, ffi::AnyBuffer down_zero, ffi::AnyBuffer down_index,
               ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> hidden,
               ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Dictionary dictionary) {
  return Guard("quantized_mlp", [&] {
    Attributes attributes(dictionary);
    ProductAttributes of_up = {attributes.Get<int64_t>("bits"),
                               attributes.Get<int64_t>("group_size")};
    ProductAttributes of_down = {attributes.Get<int64_t>("down_bits"),
                                 attributes.Get<int64_t>("down_group_size")};
    const auto codebooks = Codebooks::Of(&attributes);
    of_up.half_sums = of_down.half_sums = attributes.Get<bool>("half_sums");
    of_up.gated = true;
    const auto activation = attributes.Get<std::string_view>("activation");
    Operands up, down;
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = DecodeActivation(activation, &up.problem.epilogue.activation);
    if (error.success()) error = codebooks.Check(2);
    if (error.success()) error = place.Find(stream);
    if (error.success()) {
      of_up.codebook = codebooks.Own(0);
      of_down.codebook = codebooks.Own(1);
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *hidden, of_up, &up);
    }
    if (error.success()) {
      error = DecodeOperands(*hidden, {down_packed, down_scale, down_zero, down_index}, *out,
                             of_down, &down);
    }
    if (error.success()) {
      error = CheckType("hidden", *hidden, up.problem.out == up.problem.lhs, "the type of lhs");
    }
    if (error.success()) error = Enqueue({up}, Workspace(*workspace), place);
    // The second product may overwrite what the first has read.
    down.problem.pdl = true;
    return error.failure() ? error : Enqueue({down}, Workspace(*workspace), place);
  });
}

template <ffi::ExecutionStage kStage>
auto BindMatmuls() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // lhs
      .RemainingArgs()                       // weights
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .RemainingRets()                       // outs
      .Attrs();
}

template <ffi::ExecutionStage kStage>
auto BindMlp() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // lhs
      .template Arg<ffi::AnyBuffer>()        // gate_up: packed
      .template Arg<ffi::AnyBuffer>()        // scale
      .template Arg<ffi::AnyBuffer>()        // zero
      .template Arg<ffi::AnyBuffer>()        // index
      .template Arg<ffi::AnyBuffer>()        // down: packed
      .template Arg<ffi::AnyBuffer>()        // scale
      .template Arg<ffi::AnyBuffer>()        // zero
      .template Arg<ffi::AnyBuffer>()        // index
      .template Ret<ffi::AnyBuffer>()        // out
      .template Ret<ffi::AnyBuffer>()        // hidden
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaMatmulsInitialize,
                              jaxlowbit::Matmuls<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindMatmuls<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaMatmulsExecute,
                              jaxlowbit::Matmuls<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindMatmuls<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaMlpInitialize,
                              jaxlowbit::Mlp<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindMlp<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaMlpExecute, jaxlowbit::Mlp<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindMlp<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
