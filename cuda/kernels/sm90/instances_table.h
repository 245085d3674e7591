// SPDX-License-Identifier: Apache-2.0
//
// The table of ahead-of-time instances for one type of lhs and one width. Each instances_*.cu compiles one.
#pragma once

#include <utility>

#include "cuda/kernels/instances.h"
#include "cuda/kernels/sm90/instances.h"
#include "cuda/kernels/sm90/kernel.cuh"

namespace jaxlowbit::sm90 {

template <typename T, typename S, int kBits, int... kNumbers>
KernelFunction FindTile(ZeroKind zero, int tile, std::integer_sequence<int, kNumbers...>) {
  return WithZero(zero, [&](auto kind) {
    const KernelFunction kernels[] = {
        QmmSm90Kernel<Instance<T, S, decltype(kind)::value, kBits, kNumbers>>...};
    return kernels[tile];
  });
}

template <typename T, int kBits>
KernelFunction FindKernel(bool float_scales, ZeroKind zero, int tile) {
  constexpr auto kNumbers = std::make_integer_sequence<int, kNumTiles>{};
  return float_scales ? FindTile<T, float, kBits>(zero, tile, kNumbers)
                      : FindTile<T, T, kBits>(zero, tile, kNumbers);
}

}  // namespace jaxlowbit::sm90
