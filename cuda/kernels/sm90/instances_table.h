// SPDX-License-Identifier: Apache-2.0
//
// The table of ahead-of-time instances for one type of lhs and one width. Each instances_*.cu compiles one.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm90/instances.h"
#include "cuda/kernels/sm90/kernel.cuh"

namespace jaxlowbit::sm90 {

template <typename T, ZeroKind kZero, int kBits, int... kNumbers>
KernelFunction FindTile(int tile, std::integer_sequence<int, kNumbers...>) {
  const KernelFunction kernels[] = {QmmSm90Kernel<Instance<T, T, kZero, kBits, kNumbers>>...};
  return kernels[tile];
}

// For a prebuilt instance (IsPrebuilt in instances.h). `zeros`: with zero points.
template <typename T, int kBits>
KernelFunction FindKernel(bool zeros, int tile) {
  constexpr bool kIsCommon = kBits == 4 && std::is_same_v<T, __nv_bfloat16>;
  constexpr auto kBuilt = std::make_integer_sequence<int, kPrebuiltTiles>{};
  constexpr auto kPlain =
      std::make_integer_sequence<int, kIsCommon ? kFloatTiles : kPrebuiltTiles>{};
  if constexpr (HasPrebuiltZeros(kBits, ZeroKind::kInteger)) {
    if (zeros) return FindTile<T, ZeroKind::kInteger, kBits>(tile, kBuilt);
  }
  return FindTile<T, ZeroKind::kNone, kBits>(tile, kPlain);
}

}  // namespace jaxlowbit::sm90
