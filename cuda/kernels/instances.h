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

// Returns visit(std::integral_constant<ZeroKind, kZero>{}) with the kind of zeros.
template <typename Visit>
auto WithZero(ZeroKind zero, Visit visit) {
  return zero == ZeroKind::kNone ? visit(std::integral_constant<ZeroKind, ZeroKind::kNone>{})
         : zero == ZeroKind::kInteger
             ? visit(std::integral_constant<ZeroKind, ZeroKind::kInteger>{})
             : visit(std::integral_constant<ZeroKind, ZeroKind::kFloat>{});
}

}  // namespace jaxlowbit
