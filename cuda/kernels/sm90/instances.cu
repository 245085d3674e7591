// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm90/instances.h"

namespace jaxlowbit::sm90 {

// The instances for one type of lhs and one width (instances_table.h). Each is compiled in its own file.
template <typename T, int kBits>
KernelFunction FindKernel(bool zeros, int tile);

extern template KernelFunction FindKernel<__nv_bfloat16, 4>(bool, int);
extern template KernelFunction FindKernel<__nv_bfloat16, 8>(bool, int);
extern template KernelFunction FindKernel<__half, 4>(bool, int);
extern template KernelFunction FindKernel<__half, 8>(bool, int);

KernelFunction Find(const InstanceKey& key) {
  if (!IsPrebuilt(key)) return nullptr;
  return WithHopperFormat(key, [&](auto lhs, auto zero, auto bits) {
    return FindKernel<typename decltype(lhs)::type, decltype(bits)::value>(
        decltype(zero)::value == ZeroKind::kInteger, key.variant);
  });
}

}  // namespace jaxlowbit::sm90
