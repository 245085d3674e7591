// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm80/plan.h"
#include "cuda/kernels/sm80_transposed/instances.h"
#include "cuda/kernels/sm80_transposed/kernel.cuh"

namespace jaxlowbit::sm80_transposed {

sm80::KernelFunction Find(const InstanceKey& key) {
  return WithFormat(key, [&](auto lhs, auto scale, auto bits) {
    return WithValue<sm80::kBlockMs>(key.variant, [&](auto m) -> sm80::KernelFunction {
      using T = typename decltype(lhs)::type;
      using S = typename decltype(scale)::type;
      constexpr int kBlockM = decltype(m)::value, kBits = decltype(bits)::value;
      return sm80::QmmSm80TransposedKernel<sm80::Instance<T, S, kBlockM, kBits>>;
    });
  });
}

}  // namespace jaxlowbit::sm80_transposed
