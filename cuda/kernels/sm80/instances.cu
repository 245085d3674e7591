// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm80/instances.h"
#include "cuda/kernels/sm80/kernel.cuh"
#include "cuda/kernels/sm80/plan.h"

namespace jaxlowbit::sm80 {

static_assert(static_cast<int>(PartialSums::kNone) == kPlainSums &&
              static_cast<int>(PartialSums::kGroups) == kGroupSums &&
              static_cast<int>(PartialSums::kHalfStages) == kHalfStageSums);

KernelFunction Find(const InstanceKey& key) {
  const Variant variant = Variant::Of(key);
  if (variant.partial_sums != kPlainSums || variant.ragged) return nullptr;
  return WithFormat(key, [&](auto lhs, auto scale, auto bits) {
    return WithValue<kBlockMs>(variant.block_m, [&](auto m) -> KernelFunction {
      using T = typename decltype(lhs)::type;
      using S = typename decltype(scale)::type;
      constexpr int kBlockM = decltype(m)::value, kBits = decltype(bits)::value;
      return QmmSm80Kernel<Instance<T, S, kBlockM, kBits>>;
    });
  });
}

}  // namespace jaxlowbit::sm80
