// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers of what lies between two attentions of a transformer, alone or after the first of them in a decode
// step: five kernels or more, all but the first under PDL (cuda/kernels/launch_config.h).
// Operands and results are those of block_operands.h and, where there is an attention, attend_operands.h. A block may
// round the rows that it multiplies to 8 bits (cuda/ops/quantize_rows.h): normalized ones as they are written, attended
// and hidden ones by two more kernels.
//
// In a decode step several devices may share a block: each has some of the heads and of the hidden features, so that
// `projected` are parts of a sum, float32, which the normalizations add over the devices (cuda/ops/exchange.h).
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/ops/attend.h"
#include "cuda/ops/exchange.h"
#include "cuda/ops/rms_norm.h"
#include "xla_ffi/attend_operands.h"
#include "xla_ffi/block_operands.h"
#include "xla_ffi/cuda_bytes.h"
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

// `lhs_scale`: where the rows that are multiplied are rounded, their scales, of one product after the other; or null.
ffi::Error EnqueueBlock(const BlockBuffers& buffers, std::vector<Operands> products,
                        ffi::Buffer<ffi::U8> workspace, float epsilon, const Exchange& exchange,
                        float* lhs_scale, const Place& place) {
  const QuantizedMatmul& p = products[0].problem;
  if (place.stage == Stage::kInitialize) return LoadBlock(products, workspace, place);
  const auto bytes = static_cast<int64_t>(workspace.element_count());
  Placement placement(workspace.untyped_data(), bytes, place.stream);
  void* result = buffers.result.untyped_data();
  ffi::Error error = RedirectResults(buffers, &products, &placement, &result);

  const bool follows = products.size() > kWeights;
  const auto multiply = [&](size_t begin, size_t end) {
    return Enqueue({products.begin() + begin, products.begin() + end},
                   {placement.workspace(), placement.bytes()}, place);
  };
  const auto normalize = [&](const void* x, void* total, const ffi::AnyBuffer* scales) {
    RmsNorm norm = {p.floats(),
                    p.floats(),
                    p.out,
                    p.m,
                    p.n,
                    x,
                    buffers.projected.untyped_data(),
                    nullptr,
                    total,
                    buffers.normed.untyped_data(),
                    epsilon,
                    exchange,
                    p.lhs,
                    lhs_scale};
    if (scales != nullptr) {
      norm.scale = scales->untyped_data();
      norm.scale_type = *FloatType(scales->element_type());
    }
    return ToError(LaunchRmsNorm(norm, DeviceInfo(place.device), place.stream),
                   "launching the normalization");
  };
  // Rounds rows that product i multiplies.
  const auto round = [&](size_t i, const ffi::AnyBuffer& rows, const ffi::AnyBuffer& values) {
    if (lhs_scale == nullptr) return ffi::Error::Success();
    const QuantizedMatmul& own = products[i].problem;
    const QuantizeRows problem = {own.floats(),
                                  own.lhs,
                                  own.m,
                                  own.k,
                                  rows.untyped_data(),
                                  nullptr,
                                  values.untyped_data(),
                                  lhs_scale,
                                  i > 0,
                                  i > 0 || own.bits > 4};
    return ToError(LaunchQuantizeRows(problem, place.stream), "launching the rounding of rows");
  };
  void* sum = buffers.sum.untyped_data();
  if (error.success()) error = round(0, buffers.attended, buffers.lhs_of_out);
  if (error.success()) error = multiply(0, 1);
  if (error.success()) {
    error = normalize(buffers.residual.untyped_data(), sum, &buffers.norm);
  }
  if (error.success()) error = multiply(1, 2);
  if (error.success()) error = round(2, buffers.hidden, buffers.lhs_of_down);
  if (error.success()) error = multiply(2, 3);
  if (error.success()) error = normalize(sum, result, follows ? &buffers.following_norm : nullptr);
  if (error.success() && follows) error = multiply(kWeights, products.size());
  const ffi::Error finished = ToError(placement.Finish(), "copying results of a block");
  return error.failure() ? error : finished;
}

// The memory in which the devices of a group add rows of the first product `p`; none for one device alone.
ffi::Error FindExchange(ffi::Span<const int64_t> group, const QuantizedMatmul& p,
                        const Place& place, Exchange* exchange) {
  if (group.size() < 2) return ffi::Error::Success();
  if (p.m > kMaxExchangeRows) {
    return Refuse("a block on several devices has " + std::to_string(p.m) + " rows but at most " +
                  std::to_string(kMaxExchangeRows) + " are possible.");
  }
  const std::vector<int> devices(group.begin(), group.end());
  return ToError(FindExchange(devices, place.device, p.n, exchange),
                 "finding memory that " + std::to_string(devices.size()) + " devices share, as " +
                     Describe(p, place.device) + ",");
}

// What the calls have in common. `group`: CUDA's numbers of the devices that share the block. `lhs_scale`: that of rows
// that are rounded, if any. `attend` enqueues the attention, or loads it, after all checks, if there is one.
template <typename Attention>
ffi::Error RunBlock(const BlockBuffers& buffers, const Tail& tail, Attributes* attributes,
                    ffi::Buffer<ffi::U8> workspace, const Place& place, bool attends,
                    ffi::Span<const int64_t> group, const ffi::AnyBuffer* lhs_scale,
                    const Attention& attend) {
  const auto bits = attributes->Get<ffi::Span<const int64_t>>("bits");
  const auto group_size = attributes->Get<ffi::Span<const int64_t>>("group_size");
  const auto codebooks = Codebooks::Of(attributes);
  const auto name = attributes->Get<std::string_view>("activation");
  const auto epsilon = attributes->Get<float>("epsilon");
  std::vector<Operands> products;
  Activation activation;
  Exchange exchange;
  ffi::Error error = attributes->Check();
  if (error.success()) error = DecodeActivation(name, &activation);
  if (error.success()) {
    error = DecodeProducts(buffers, tail, bits, group_size, codebooks, &products);
  }
  if (error.success())
    error = CheckRows(buffers, tail.following() > 0, products[0].problem, group.size() > 1);
  if (error.failure() || products[0].problem.m == 0) return error;
  for (size_t i = 0; i < products.size(); ++i) {
    products[i].problem.pdl = attends || i > 0 || lhs_scale != nullptr;
  }
  products[1].problem.epilogue.activation = activation;
  for (size_t i = 0; i < products.size(); ++i) {  // before anything is launched
    error = lhs_scale == nullptr
                ? CheckSupported(products[i].problem, place.device)
                : AddScales(*lhs_scale, tail.weight(i, kPerWeight), place, &products[i]);
    if (error.failure()) return error;
  }
  error = FindExchange(group, products[0].problem, place, &exchange);
  if (error.success()) error = attend();
  if (error.failure()) return error;
  float* scales = lhs_scale == nullptr ? nullptr : static_cast<float*>(lhs_scale->untyped_data());
  return EnqueueBlock(buffers, products, workspace, epsilon, exchange, scales, place);
}

ffi::Error RefuseCount(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                       size_t operands, size_t results) {
  return Refuse("the call has " + std::to_string(args.size()) + " operands and " +
                std::to_string(rets.size()) + " results but must have at least " +
                std::to_string(operands) + " and " + std::to_string(results) + ".");
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
    const BlockBuffers buffers = {attended,   residual, norm,    following_norm, *result,
                                  *projected, *sum,     *normed, *hidden};
    Place place(kStage);
    const ffi::Error error = place.Find(stream);
    if (error.failure()) return error;
    const auto none = [] { return ffi::Error::Success(); };
    const Tail tail = {weights, 0, following, 0};
    return RunBlock(buffers, tail, &attributes, *workspace, place, false, {}, nullptr, none);
  });
}

// Operands after those of the attention: residual, norm, following_norm and the weights. Attribute `devices`, s64[]:
// CUDA's numbers of those that share the block; absent for a device alone. Results after its own: result,
// projected, sum, normed, hidden, and the following products.
template <Stage kStage>
ffi::Error DecodeBlock(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary dictionary) {
  return Guard("decode_block", [&] {
    constexpr size_t kOperands = kAttendOperands + 3, kResults = kAttendResults + 5;
    if (args.size() < kOperands || rets.size() < kResults) {
      return RefuseCount(args, rets, kOperands, kResults);
    }
    const auto arg = [&](size_t i) {
      return args.get<ffi::AnyBuffer>(kAttendOperands + i).value();
    };
    const auto ret = [&](size_t i) {
      return *rets.get<ffi::AnyBuffer>(kAttendResults + i).value();
    };
    const AttendBuffers attention(args, rets);
    auto workspace = rets.get<ffi::Buffer<ffi::U8>>(kAttendResults - 1);
    if (workspace.has_error()) return workspace.error();
    Attributes attributes(dictionary);
    Attend attend;
    Place place(kStage);
    ffi::Error error = DecodeAttend(attention, &attributes, &attend);
    const auto devices = dictionary.get<ffi::Span<const int64_t>>("devices");
    const auto group = devices.has_value() ? *devices : ffi::Span<const int64_t>();
    if (attributes.Check().failure()) return attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.success() && kStage == Stage::kExecute) error = CheckApart(attention);
    if (error.failure()) return error;
    const auto launch = [&] {
      const Device& device = DeviceInfo(place.device);
      const Workspace room(**workspace);
      const std::string what = DescribeAttend(attend, place.device);
      if (kStage == Stage::kInitialize) {
        return ToError(LoadAttend(attend, device), "loading " + what);
      }
      return ToError(LaunchAttend(attend, room.data, room.bytes, device, stream),
                     "launching " + what);
    };
    const BlockBuffers buffers = {attention.out, arg(0), arg(1), arg(2), ret(0),
                                  ret(1),        ret(2), ret(3), ret(4)};
    const Tail tail = {args, kOperands, rets, kResults};
    return RunBlock(buffers, tail, &attributes, **workspace, place, true, group, nullptr, launch);
  });
}

// A block that rounds its rows to 8 bits. Operands: attended, residual, norm, following_norm and the weights. Results:
// result, projected, sum, hidden; values of attended, of the normalized rows and of hidden, s8 or f8e4m3fn [1, m, k],
// interleaved; lhs_scale, f32[1, m]; the workspace, and the following products.
template <Stage kStage>
ffi::Error RoundedBlock(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary dictionary) {
  return Guard("quantized_block", [&] {
    constexpr size_t kOperands = 4, kResults = 9;
    if (args.size() < kOperands || rets.size() < kResults) {
      return RefuseCount(args, rets, kOperands, kResults);
    }
    const auto arg = [&](size_t i) { return args.get<ffi::AnyBuffer>(i).value(); };
    const auto ret = [&](size_t i) { return *rets.get<ffi::AnyBuffer>(i).value(); };
    auto workspace = rets.get<ffi::Buffer<ffi::U8>>(kResults - 1);
    if (workspace.has_error()) return workspace.error();
    const BlockBuffers buffers = {arg(0), arg(1), arg(2), arg(3), ret(0), ret(1),
                                  ret(2), ret(5), ret(3), ret(4), ret(6)};
    const ffi::AnyBuffer lhs_scale = ret(7);
    Attributes attributes(dictionary);
    Place place(kStage);
    const ffi::Error error = place.Find(stream);
    if (error.failure()) return error;
    const auto none = [] { return ffi::Error::Success(); };
    const Tail tail = {args, kOperands, rets, kResults, kPerByteWeight};
    return RunBlock(buffers, tail, &attributes, **workspace, place, false, {}, &lhs_scale, none);
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

template <ffi::ExecutionStage kStage>
auto BindRemaining() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaDecodeBlockInitialize,
                              jaxlowbit::DecodeBlock<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindRemaining<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaDecodeBlockExecute,
                              jaxlowbit::DecodeBlock<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindRemaining<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaRoundedBlockInitialize,
                              jaxlowbit::RoundedBlock<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindRemaining<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaRoundedBlockExecute,
                              jaxlowbit::RoundedBlock<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindRemaining<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
