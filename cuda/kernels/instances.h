// SPDX-License-Identifier: Apache-2.0
//
// From a key, known at run time, to the template arguments of an ahead-of-time instance.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <iterator>
#include <type_traits>
#include <utility>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit {

template <typename T>
struct Type {
  using type = T;
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <auto& kValues, typename Visit, size_t... kIndex>
auto WithValue(int value, Visit visit, std::index_sequence<kIndex...>) {
  decltype(visit(Constant<kValues[0]>{})) result = {};
  ((value == kValues[kIndex] ? void(result = visit(Constant<kValues[kIndex]>{})) : void()), ...);
  return result;
}

// Returns visit(Constant<v>{}) for the element v of kValues that equals `value`, or null.
template <auto& kValues, typename Visit>
auto WithValue(int value, Visit visit) {
  return WithValue<kValues>(value, visit, std::make_index_sequence<std::size(kValues)>{});
}

// Returns visit(Type<T>{}) with the type of lhs.
template <typename Visit>
auto WithLhs(const InstanceKey& key, Visit visit) {
  return key.lhs == ElementType::kBf16 ? visit(Type<__nv_bfloat16>{}) : visit(Type<__half>{});
}

// Returns visit(Type<T>{}, Type<S>{}, Constant<kBits>{}) with the types of lhs and of the scales and with the width.
template <typename Visit>
auto WithFormat(const InstanceKey& key, Visit visit) {
  return WithLhs(key, [&](auto lhs) {
    return WithValue<kKernelBits>(key.bits, [&](auto bits) {
      return key.scale == ElementType::kF32 ? visit(lhs, Type<float>{}, bits)
                                            : visit(lhs, lhs, bits);
    });
  });
}

// Returns visit(Type<T>{}, std::integral_constant<ZeroKind, kZero>{}, Constant<kBits>{}) with the type of lhs and of the
// scales, the kind of zeros and the width, for instances of Hopper's kernels; null for those that are not built.
template <typename Visit>
auto WithHopperFormat(const InstanceKey& key, Visit visit) {
  const auto with = [&](auto zero) {
    return WithLhs(key, [&](auto lhs) {
      return WithValue<kKernelBits>(key.bits, [&](auto bits) { return visit(lhs, zero, bits); });
    });
  };
  using None = std::integral_constant<ZeroKind, ZeroKind::kNone>;
  using Integer = std::integral_constant<ZeroKind, ZeroKind::kInteger>;
  if (!IsBuilt(key)) return decltype(with(None{})){};
  return key.zero == ZeroKind::kNone ? with(None{}) : with(Integer{});
}

}  // namespace jaxlowbit
