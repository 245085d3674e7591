// SPDX-License-Identifier: Apache-2.0
//
// The table of ahead-of-time instances for one type of lhs and one width. Each instances_*.cu compiles one.
#pragma once

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

// `zeros`: whether there are zero points.
template <typename T, int kBits>
KernelFunction FindKernel(bool zeros, int tile) {
  constexpr auto kNumbers = std::make_integer_sequence<int, kNumTiles>{};
  return zeros ? FindTile<T, ZeroKind::kInteger, kBits>(tile, kNumbers)
               : FindTile<T, ZeroKind::kNone, kBits>(tile, kNumbers);
}

}  // namespace jaxlowbit::sm90
