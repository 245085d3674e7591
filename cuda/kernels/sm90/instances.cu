// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm90/instances.h"

namespace jaxlowbit::sm90 {

// The instances for one type of lhs and one width (instances_table.h), which have a file each.
template <typename T, int kBits>
KernelFunction FindKernel(bool float_scales, ZeroKind zero, int tile);

extern template KernelFunction FindKernel<__nv_bfloat16, 4>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__nv_bfloat16, 8>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__half, 4>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__half, 8>(bool, ZeroKind, int);

KernelFunction Find(const InstanceKey& key) {
  return WithLhs(key, [&](auto lhs) {
    return WithValue<kKernelBits>(key.bits, [&](auto bits) {
      return FindKernel<typename decltype(lhs)::type, decltype(bits)::value>(
          key.scale == ElementType::kF32, key.zero, key.variant);
    });
  });
}

}  // namespace jaxlowbit::sm90
