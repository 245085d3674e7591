// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cuda_normalize.h"

#include <string>

#include "cuda/limits.h"
#include "cuda/ops/rms_norm.h"

namespace jaxlowbit {
namespace {

class NormalizeStep final : public LoadedStep {
 public:
  // The pointers of `norm` are not set.
  NormalizeStep(const RmsNorm& norm, const NormAddresses& addresses, const Device& device)
      : norm_(norm), at_(addresses), device_(device) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    RmsNorm norm = norm_;
    SetPointers(at_, pointers, &norm);
    return LaunchRmsNorm(norm, device_, stream);
  }

 private:
  const RmsNorm norm_;
  const NormAddresses at_;
  const Device& device_;
};

bool IsQuantized(ffi::DataType type) {
  return type == ffi::DataType::S8 || type == ffi::DataType::F8E4M3FN;
}

}  // namespace

ffi::Error CheckNormalize(const Call& call, const Step& step) {
  if (step.x == 0 || step.total == 0) return InvalidArgument("a normalization has no rows.");
  const ffi::AnyBuffer x = call.At(step.x);
  const ffi::DataType type = x.element_type();
  const auto elements = static_cast<int64_t>(x.element_count());
  const auto has_type = [&](const char* name, int64_t place, bool wide) {
    const ffi::AnyBuffer buffer = call.At(place);
    return CheckType(
        name, buffer,
        buffer.element_type() == type || (wide && buffer.element_type() == ffi::DataType::F32),
        wide ? "f32 or the type of the rows" : "the type of the rows");
  };
  ffi::Error error = CheckType("rows", x, FloatType(type).has_value(), "f32, bf16 or f16");
  if (error.success()) error = CheckRank("rows", x, 3, "[1, m, columns]");
  if (error.failure()) return error;
  const int64_t columns = x.dimensions()[2];
  if (columns % 8 != 0 || columns > kMaxRmsNormColumns) {
    return InvalidArgument("rows are normalized that have " + std::to_string(columns) +
                           " elements, but it must be a multiple of 8 up to " +
                           std::to_string(kMaxRmsNormColumns) + ".");
  }
  error = has_type("sum", step.total, false);
  if (error.success()) error = CheckCount("sum", call.At(step.total), elements, "the rows'");
  if (error.success() && step.addend != 0) {
    error = has_type("addend", step.addend, true);
    if (error.success()) {
      error = CheckCount("addend", call.At(step.addend), elements, "the rows'");
    }
  }
  if (error.failure() || step.scales == 0) return error;
  if (step.out == 0) return InvalidArgument("a normalization with scales has no result.");
  const ffi::AnyBuffer out = call.At(step.out);
  error = has_type("norm", step.scales, true);
  if (error.success()) error = CheckShape("norm", call.At(step.scales), {columns}, "[columns]");
  if (error.success()) error = CheckCount("normed", out, elements, "the rows'");
  if (error.failure() || step.out_scale == 0) {
    return error.failure() ? error : has_type("normed", step.out, false);
  }
  error = CheckType("normed", out, IsQuantized(out.element_type()), "s8 or f8e4m3fn");
  if (error.failure()) return error;
  return CheckCount("lhs_scale", call.At(step.out_scale), elements / columns, "rows");
}

RmsNorm ReadNorm(const Call& call, const Step& step, float epsilon, const Exchange& exchange) {
  const ffi::AnyBuffer x = call.At(step.x);
  const auto type_at = [&](int64_t place) {
    return *FloatType(call.At(place == 0 ? step.x : place).element_type());
  };
  RmsNorm norm = {type_at(step.x),
                  type_at(step.scales),
                  type_at(step.addend),
                  x.dimensions()[0] * x.dimensions()[1],
                  x.dimensions()[2],
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  epsilon,
                  exchange};
  if (step.out_scale != 0) {
    norm.out_type = call.At(step.out).element_type() == ffi::DataType::S8 ? ElementType::kInt8
                                                                          : ElementType::kE4m3;
  }
  return norm;
}

std::unique_ptr<const LoadedStep> LoadNormalize(const RmsNorm& norm, const NormAddresses& addresses,
                                                const Device& device) {
  return std::make_unique<NormalizeStep>(norm, addresses, device);
}

PlannedNorm PlannedNormOf(const RmsNorm& norm, const NormAddresses& addresses) {
  return {norm.type,    norm.addend_type, norm.scale_type,  norm.rows,        norm.columns,
          norm.epsilon, addresses.x,      addresses.addend, addresses.scales, addresses.total};
}

}  // namespace jaxlowbit
