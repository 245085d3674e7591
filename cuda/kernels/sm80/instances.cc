// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm80/instances.h"

#include "cuda/kernels/sm80/plan.h"

namespace jaxlowbit::sm80 {
namespace {

constexpr const char* kPartialSums[] = {"kNone", "kGroups", "kHalfStages"};

}  // namespace

// The kind of zeros, if any, is a run-time parameter of the kernel.
InstanceKey KeyOf(const QuantizedMatmul& problem, int block_m, const Device& device) {
  const bool half_stages = problem.may_accumulate_float16() && device.can_compile();
  const int partial_sums = problem.scale_accumulators ? kGroupSums
                           : half_stages              ? kHalfStageSums
                                                      : kPlainSums;
  return {Family::kSm80,
          problem.lhs,
          problem.scale,
          ZeroKind::kNone,
          problem.bits,
          problem.codebook,
          Variant{block_m, partial_sums, problem.is_ragged()}.number()};
}

std::string NameOf(const InstanceKey& key) {
  const Variant variant = Variant::Of(key);
  const std::string instance =
      "jaxlowbit::sm80::Instance<" + CudaName(key.lhs) + ", " + CudaName(key.scale) + ", " +
      std::to_string(variant.block_m) + ", " + std::to_string(key.bits) +
      ", jaxlowbit::sm80::PartialSums::" + kPartialSums[variant.partial_sums] +
      LastArgument(key.codebook) + ">";
  return "jaxlowbit::sm80::QmmSm80Kernel<" +
         (variant.ragged ? "jaxlowbit::sm80::RaggedInstance<" + instance + ">" : instance) + ">";
}

std::vector<InstanceKey> InstancesOf(int bits) {
  std::vector<InstanceKey> keys;
  const auto add = [&](InstanceKey key, int block_m, int partial_sums) {
    key.variant = Variant{block_m, partial_sums}.number();
    keys.push_back(key);
  };
  ForEachFormat(Family::kSm80, bits, [&](const InstanceKey& key) {
    if (key.zero != ZeroKind::kNone) return;
    for (int block_m : kBlockMs) {
      add(key, block_m, kPlainSums);
      if (key.lhs == ElementType::kF16 && !Is8Bit(key.scale)) add(key, block_m, kHalfStageSums);
    }
    const bool sums = key.lhs == ElementType::kBf16 && key.scale == ElementType::kF32 &&
                      key.codebook == Codebook::kNone;
    if (!sums) return;
    for (int block_m : kScaleAccumulatorsBlockMs) add(key, block_m, kGroupSums);
  });
  return keys;
}

}  // namespace jaxlowbit::sm80
