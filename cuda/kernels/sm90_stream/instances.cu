// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm90_stream/instances.h"
#include "cuda/kernels/sm90_stream/kernel.cuh"

namespace jaxlowbit::sm90_stream {
namespace {

template <typename T, ZeroKind kZero, int kBits, int kNumber>
KernelFunction FindVariant(bool divided) {
  constexpr Variant kVariant = kVariants[kNumber];
  constexpr bool kBfloat16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr ElementType kType = kBfloat16 ? ElementType::kBf16 : ElementType::kF16;
  constexpr InstanceKey kFormat = {Family::kSm90Stream, kType, kType, kZero, kBits};
  if constexpr (HasPrebuiltZeros(kBits, kZero) &&
                kVariant.block_m <= MaxRows(kBits, ElementType::kBf16)) {
    using Dense =
        Instance<T, T, kZero, kVariant.block_m, kBits, kVariant.ctas_per_sm, kVariant.lhs_path>;
    if (!divided) return QmmSm90StreamKernel<Dense>;
    if constexpr (HasDivided(kFormat, kVariant)) return QmmSm90StreamKernel<DividedInstance<Dense>>;
  }
  return nullptr;
}

template <typename T, ZeroKind kZero, int kBits, size_t... kNumber>
KernelFunction FindVariant(const InstanceKey& key, std::index_sequence<kNumber...>) {
  Variant wanted = Variant::Of(key);
  const bool divided = std::exchange(wanted.divided, false);
  KernelFunction found = nullptr;
  ((wanted.number() == kVariants[kNumber].number()
        ? void(found = FindVariant<T, kZero, kBits, kNumber>(divided))
        : void()),
   ...);
  return found;
}

}  // namespace

KernelFunction Find(const InstanceKey& key) {
  return WithHopperFormat(key, [&](auto lhs, auto zero, auto bits) {
    return FindVariant<typename decltype(lhs)::type, decltype(zero)::value, decltype(bits)::value>(
        key, std::make_index_sequence<std::size(kVariants)>{});
  });
}

}  // namespace jaxlowbit::sm90_stream
