// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm80/instances.h"
#include "cuda/kernels/sm80/kernel.cuh"
#include "cuda/kernels/sm80/plan.h"

namespace jaxlowbit::sm80 {

KernelFunction Find(const QuantizedMatmul& problem, int block_m) {
  if (problem.scale_sums) {
    return WithValue<kKernelBits>(problem.bits, [&](auto bits) {
      return WithValue<kScaleSumsBlockMs>(block_m, [&](auto m) -> KernelFunction {
        constexpr int kBlockM = decltype(m)::value, kBits = decltype(bits)::value;
        return QmmSm80Kernel<Instance<__nv_bfloat16, float, kBlockM, kBits, PartialSums::kGroups>>;
      });
    });
  }
  return WithFormat(problem, [&](auto lhs, auto scale, auto bits) {
    return WithValue<kBlockMs>(block_m, [&](auto m) -> KernelFunction {
      using T = typename decltype(lhs)::type;
      using S = typename decltype(scale)::type;
      constexpr int kBlockM = decltype(m)::value, kBits = decltype(bits)::value;
      if constexpr (std::is_same_v<T, __half>) {
        if (problem.half_sums) {
          return QmmSm80Kernel<Instance<T, S, kBlockM, kBits, PartialSums::kHalfStages>>;
        }
      }
      return QmmSm80Kernel<Instance<T, S, kBlockM, kBits>>;
    });
  });
}

}  // namespace jaxlowbit::sm80
