// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm80/instances.h"
#include "cuda/kernels/sm80/kernel.cuh"
#include "cuda/kernels/sm80/plan.h"

namespace jaxlowbit::sm80 {

static_assert(static_cast<int>(PartialSums::kNone) == 0 &&
                  static_cast<int>(PartialSums::kGroups) == 1 &&
                  static_cast<int>(PartialSums::kHalfStages) == 2,
              "instances.cc names them in this order");

KernelFunction Find(const InstanceKey& key) {
  const Variant variant = Variant::Of(key);
  const auto partial_sums = static_cast<PartialSums>(variant.partial_sums);
  if (partial_sums == PartialSums::kGroups) {
    return WithValue<kKernelBits>(key.bits, [&](auto bits) {
      return WithValue<kScaleSumsBlockMs>(variant.block_m, [&](auto m) -> KernelFunction {
        constexpr int kBlockM = decltype(m)::value, kBits = decltype(bits)::value;
        return QmmSm80Kernel<Instance<__nv_bfloat16, float, kBlockM, kBits, PartialSums::kGroups>>;
      });
    });
  }
  return WithFormat(key, [&](auto lhs, auto scale, auto bits) {
    return WithValue<kBlockMs>(variant.block_m, [&](auto m) -> KernelFunction {
      using T = typename decltype(lhs)::type;
      using S = typename decltype(scale)::type;
      constexpr int kBlockM = decltype(m)::value, kBits = decltype(bits)::value;
      if constexpr (std::is_same_v<T, __half>) {
        if (partial_sums == PartialSums::kHalfStages) {
          return QmmSm80Kernel<Instance<T, S, kBlockM, kBits, PartialSums::kHalfStages>>;
        }
      }
      return QmmSm80Kernel<Instance<T, S, kBlockM, kBits>>;
    });
  });
}

}  // namespace jaxlowbit::sm80
