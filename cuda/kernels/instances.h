// SPDX-License-Identifier: Apache-2.0
//
// Dispatches run-time keys to the template arguments of ahead-of-time instances.
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

// Returns visit(Constant<v>{}) for the element v of kValues that equals `value`, else null.
template <auto& kValues, typename Visit>
auto WithValue(int value, Visit visit) {
  return WithValue<kValues>(value, visit, std::make_index_sequence<std::size(kValues)>{});
}

// Returns visit(Type<T>{}) with the type of lhs.
template <typename Visit>
auto WithLhs(const InstanceKey& key, Visit visit) {
  return key.lhs == ElementType::kBf16 ? visit(Type<__nv_bfloat16>{}) : visit(Type<__half>{});
}

// Returns visit(Type<T>{}, Type<S>{}, Constant<kBits>{}) with the types of lhs and scales, and the width.
template <typename Visit>
auto WithFormat(const InstanceKey& key, Visit visit) {
  return WithLhs(key, [&](auto lhs) {
    return WithValue<kKernelBits>(key.bits, [&](auto bits) {
      return key.scale == ElementType::kF32 ? visit(lhs, Type<float>{}, bits)
                                            : visit(lhs, lhs, bits);
    });
  });
}

// For Hopper's kernels: returns visit(Type<T>{}, std::integral_constant<ZeroKind, kZero>{}, Constant<kBits>{}), where T
// is the type of both lhs and scales; null if the instance is not prebuilt.
template <typename Visit>
auto WithHopperFormat(const InstanceKey& key, Visit visit) {
  const auto with = [&](auto zero) {
    return WithLhs(key, [&](auto lhs) {
      return WithValue<kKernelBits>(key.bits, [&](auto bits) { return visit(lhs, zero, bits); });
    });
  };
  using None = std::integral_constant<ZeroKind, ZeroKind::kNone>;
  using Integer = std::integral_constant<ZeroKind, ZeroKind::kInteger>;
  if (!IsPrebuiltFormat(key)) return decltype(with(None{})){};
  return key.zero == ZeroKind::kNone ? with(None{}) : with(Integer{});
}

}  // namespace jaxlowbit
