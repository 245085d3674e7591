// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm90_stream/instances.h"
#include "cuda/kernels/sm90_stream/kernel.cuh"

namespace jaxlowbit::sm90_stream {
namespace {

template <typename T, ZeroKind kZero, int kBits, int kNumber>
KernelFunction FindVariant() {
  constexpr Variant kVariant = kVariants[kNumber];
  if constexpr (HasPrebuiltZeros(kBits, kZero) &&
                kVariant.block_m <= MaxRows(kBits, ElementType::kBf16)) {
    return QmmSm90StreamKernel<
        Instance<T, T, kZero, kVariant.block_m, kBits, kVariant.ctas_per_sm, kVariant.lhs_path>>;
  }
  return nullptr;
}

template <typename T, ZeroKind kZero, int kBits, size_t... kNumber>
KernelFunction FindVariant(int variant, std::index_sequence<kNumber...>) {
  KernelFunction found = nullptr;
  ((variant == kVariants[kNumber].number() ? void(found = FindVariant<T, kZero, kBits, kNumber>())
                                           : void()),
   ...);
  return found;
}

}  // namespace

KernelFunction Find(const InstanceKey& key) {
  return WithHopperFormat(key, [&](auto lhs, auto zero, auto bits) {
    return FindVariant<typename decltype(lhs)::type, decltype(zero)::value, decltype(bits)::value>(
        key.variant, std::make_index_sequence<std::size(kVariants)>{});
  });
}

}  // namespace jaxlowbit::sm90_stream
