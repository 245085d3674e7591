// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cuda_experts.h"

#include <string>

#include "cuda/limits.h"
#include "cuda/ops/combine_choices.h"
#include "cuda/ops/group_choices.h"
#include "cuda/ops/route_choices.h"

namespace jaxlowbit {
namespace {

class GroupStep final : public LoadedStep {
 public:
  // The pointers of `group` are not set.
  GroupStep(const GroupChoices& group, const ExpertAddresses& addresses)
      : group_(group), at_(addresses) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    GroupChoices group = group_;
    group.x = PointerTo(at_.x, pointers);
    group.expert = static_cast<const int32_t*>(PointerTo(at_.expert, pointers));
    group.offset = static_cast<const int32_t*>(PointerTo(at_.offset, pointers));
    group.sizes = static_cast<int32_t*>(PointerTo(at_.sizes, pointers));
    group.place = static_cast<int32_t*>(PointerTo(at_.place, pointers));
    group.rows = PointerTo(at_.out, pointers);
    return LaunchGroupChoices(group, stream);
  }

 private:
  const GroupChoices group_;
  const ExpertAddresses at_;
};

class CombineStep final : public LoadedStep {
 public:
  // The pointers of `combine` are not set.
  CombineStep(const CombineChoices& combine, const ExpertAddresses& addresses)
      : combine_(combine), at_(addresses) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    CombineChoices combine = combine_;
    combine.rows = static_cast<const float*>(PointerTo(at_.x, pointers));
    combine.place = static_cast<const int32_t*>(PointerTo(at_.place, pointers));
    combine.expert = static_cast<const int32_t*>(PointerTo(at_.expert, pointers));
    combine.offset = static_cast<const int32_t*>(PointerTo(at_.offset, pointers));
    combine.weight = PointerTo(at_.scales, pointers);
    combine.out = PointerTo(at_.out, pointers);
    return LaunchCombineChoices(combine, stream);
  }

 private:
  const CombineChoices combine_;
  const ExpertAddresses at_;
};

class RouteStep final : public LoadedStep {
 public:
  // The pointers of `route` are not set.
  RouteStep(const RouteChoices& route, const ExpertAddresses& addresses)
      : route_(route), at_(addresses) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    RouteChoices route = route_;
    route.x = PointerTo(at_.x, pointers);
    route.router = PointerTo(at_.scales, pointers);
    route.bias = PointerTo(at_.addend, pointers);
    route.expert = static_cast<int32_t*>(PointerTo(at_.expert, pointers));
    route.weight = static_cast<float*>(PointerTo(at_.out, pointers));
    return LaunchRouteChoices(route, stream);
  }

 private:
  const RouteChoices route_;
  const ExpertAddresses at_;
};

// Choices of experts: sizes of a buffer [tokens, top].
struct Choices {
  int64_t tokens = 0, top = 0;
};

ffi::Error ReadChoices(const std::string& name, const ffi::AnyBuffer& buffer, Choices* choices) {
  constexpr int64_t kMaxChoices = int64_t{1} << 30;
  const ffi::Error error = CheckRank(name, buffer, 2, "[tokens, top]");
  if (error.failure()) return error;
  *choices = {buffer.dimensions()[0], buffer.dimensions()[1]};
  const auto count = static_cast<int64_t>(buffer.element_count());
  if (count > 0 && count < kMaxChoices) return error;
  return InvalidArgument(name + " has " + std::to_string(count) +
                         " choices but it must have from 1 to 2^30 - 1.");
}

// Checks a type, then a shape.
ffi::Error CheckBuffer(const std::string& name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                       std::initializer_list<int64_t> shape, const std::string& rule) {
  const ffi::Error error = CheckType(name, buffer, type);
  return error.failure() ? error : CheckShape(name, buffer, shape, rule);
}

}  // namespace

ffi::Error CheckGroup(const Call& call, const Step& step) {
  for (int64_t place : {step.x, step.expert, step.sizes, step.place, step.out}) {
    if (place == 0) return InvalidArgument("a grouping lacks an operand or a result.");
  }
  const ffi::AnyBuffer x = call.At(step.x), expert = call.At(step.expert);
  const ffi::AnyBuffer sizes = call.At(step.sizes);
  const auto float_type = FloatType(x.element_type());
  Choices choices;
  ffi::Error error =
      CheckType("x", x, float_type && *float_type != ElementType::kF32, "bf16 or f16");
  if (error.success()) error = CheckType("expert", expert, ffi::DataType::S32);
  if (error.success()) error = ReadChoices("expert", expert, &choices);
  if (error.success()) error = CheckRank("x", x, 3, "[1, tokens, columns]");
  if (error.failure()) return error;
  const auto [tokens, top] = choices;
  const int64_t columns = x.dimensions()[2];
  error = CheckShape("x", x, {1, tokens, columns}, "[1, tokens, columns]");
  if (error.success()) {
    error = CheckBuffer("rows", call.At(step.out), x.element_type(), {1, tokens * top, columns},
                        "[1, tokens * top, columns]");
  }
  if (error.success()) {
    error = CheckBuffer("place", call.At(step.place), ffi::DataType::S32, {tokens, top},
                        "[tokens, top]");
  }
  if (error.success()) error = CheckType("sizes", sizes, ffi::DataType::S32);
  if (error.success()) error = CheckRank("sizes", sizes, 1, "[experts]");
  if (error.success() && step.offset != 0) {
    error = CheckBuffer("offset", call.At(step.offset), ffi::DataType::S32, {1}, "[1]");
  }
  if (error.failure()) return error;
  const int64_t experts = sizes.dimensions()[0];
  for (int64_t i = step.first; i < step.first + step.count; ++i) {
    const QuantizedMatmul& p = call.operands[i].problem;
    if (p.is_ragged() && p.experts() == experts && p.m == tokens * top) continue;
    return InvalidArgument("a product of grouped rows has other rows or experts than its groups.");
  }
  return error;
}

ffi::Error LoadRoute(const Call& call, const Step& step, const ExpertAddresses& addresses, bool pdl,
                     const Device& device, std::unique_ptr<const LoadedStep>* loaded) {
  for (int64_t place : {step.x, step.scales, step.expert, step.out}) {
    if (place == 0) return InvalidArgument("a router lacks an operand or a result.");
  }
  const ffi::AnyBuffer x = call.At(step.x), router = call.At(step.scales);
  const ffi::AnyBuffer bias = call.At(step.addend == 0 ? step.scales : step.addend);
  const auto type = FloatType(x.element_type()), router_type = FloatType(router.element_type());
  const auto bias_type = FloatType(bias.element_type());
  constexpr const char* kFloats = "f32, bf16 or f16";
  Choices choices;
  ffi::Error error = CheckType("x", x, type && *type != ElementType::kF32, "bf16 or f16");
  if (error.success()) error = CheckType("router", router, router_type.has_value(), kFloats);
  if (error.success()) error = CheckType("bias", bias, bias_type.has_value(), kFloats);
  if (error.success()) error = CheckType("expert", call.At(step.expert), ffi::DataType::S32);
  if (error.success()) error = ReadChoices("expert", call.At(step.expert), &choices);
  if (error.success()) error = CheckRank("x", x, 3, "[1, tokens, columns]");
  if (error.success()) error = CheckRank("router", router, 2, "[columns, experts]");
  if (error.failure()) return error;
  const auto [tokens, top] = choices;
  const int64_t columns = x.dimensions()[2], experts = router.dimensions()[1];
  error = CheckShape("x", x, {1, tokens, columns}, "[1, tokens, columns]");
  if (error.success()) {
    error = CheckShape("router", router, {columns, experts}, "[columns, experts]");
  }
  if (error.success() && step.addend != 0) {
    error = CheckShape("bias", bias, {experts}, "[experts]");
  }
  if (error.success()) {
    error = CheckBuffer("weight", call.At(step.out), ffi::DataType::F32, {tokens, top},
                        "[tokens, top]");
  }
  if (error.failure()) return error;
  const std::string reason = UnsupportedRoute(columns, experts, top, device.architecture);
  if (!reason.empty()) return InvalidArgument(reason + ".");
  const RouteChoices route = {*type,
                              *router_type,
                              *bias_type,
                              static_cast<int>(tokens),
                              static_cast<int>(top),
                              static_cast<int>(experts),
                              columns,
                              step.normalized,
                              pdl};
  *loaded = std::make_unique<RouteStep>(route, addresses);
  return error;
}

std::unique_ptr<const LoadedStep> LoadGroup(const Call& call, const Step& step,
                                            const ExpertAddresses& addresses, bool pdl) {
  const auto choices = call.At(step.expert).dimensions();
  const GroupChoices group = {static_cast<int>(choices[0]), static_cast<int>(choices[1]),
                              static_cast<int>(call.At(step.sizes).dimensions()[0]),
                              call.At(step.x).dimensions()[2], pdl};
  return std::make_unique<GroupStep>(group, addresses);
}

ffi::Error LoadCombine(const Call& call, const Step& step, const ExpertAddresses& addresses,
                       int64_t experts, const Device& device,
                       std::unique_ptr<const LoadedStep>* loaded) {
  if (device.compute_capability != kRouteCapability) {
    return InvalidArgument(
        "a mixture of experts in one call needs compute capability 9.0, but this device has " +
        std::to_string(device.compute_capability / 10) + "." +
        std::to_string(device.compute_capability % 10) + "; lower the program for this device.");
  }
  for (int64_t place : {step.x, step.scales, step.place, step.out}) {
    if (place == 0) return InvalidArgument("a combination lacks an operand or a result.");
  }
  const ffi::AnyBuffer weight = call.At(step.scales), out = call.At(step.out);
  const auto weight_type = FloatType(weight.element_type());
  const auto out_type = FloatType(out.element_type());
  constexpr const char* kFloats = "f32, bf16 or f16";
  Choices choices;
  ffi::Error error = CheckType("weight", weight, weight_type.has_value(), kFloats);
  if (error.success()) error = ReadChoices("weight", weight, &choices);
  if (error.success()) error = CheckType("sum", out, out_type.has_value(), kFloats);
  if (error.success()) error = CheckRank("sum", out, 3, "[1, tokens, columns]");
  if (error.failure()) return error;
  const auto [tokens, top] = choices;
  const int64_t columns = out.dimensions()[2];
  error = CheckShape("sum", out, {1, tokens, columns}, "[1, tokens, columns]");
  if (error.success()) {
    error = CheckBuffer("rows", call.At(step.x), ffi::DataType::F32, {1, tokens * top, columns},
                        "[1, tokens * top, columns]");
  }
  if (error.success()) {
    error = CheckBuffer("place", call.At(step.place), ffi::DataType::S32, {tokens, top},
                        "[tokens, top]");
  }
  if (error.failure()) return error;
  CombineChoices combine = {*weight_type, *out_type, static_cast<int>(tokens),
                            static_cast<int>(top), columns};
  combine.experts = static_cast<int>(experts);
  *loaded = std::make_unique<CombineStep>(combine, addresses);
  return error;
}

}  // namespace jaxlowbit
