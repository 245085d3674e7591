// SPDX-License-Identifier: Apache-2.0
//
// Costs of codebooks and of merging bit planes, added to the cost models, which are fitted to 4-bit and 8-bit integers.
#pragma once

#include "cuda/problem.h"

namespace jaxlowbit {

// The cost of decoding, in enum order of Codebook (device/format/kinds.h).
#define JAXLOWBIT_COST(enumerator, name, bits, exponent_bits, cost) cost,
inline constexpr double kCodebookAtoms[] = {JAXLOWBIT_CODEBOOKS(JAXLOWBIT_COST)};
#undef JAXLOWBIT_COST

// The cost of merging the planes of 5 to 7 bits, compared to 8-bit weights of the same size in bytes
// (docs/measurements/widths_5_to_7.md).
inline constexpr double kPlanesAtom = 0.027;

// `microscaled`: the kernel's own value for MXFP4 and NVFP4 with bfloat16.
constexpr double NumbersAtom(
    const QuantizedMatmul& problem,
    double microscaled = kCodebookAtoms[static_cast<int>(Codebook::kE2m1)]) {
  const bool merges = problem.bits > 4 && problem.bits < 8;
  const bool is_microscaled = problem.codebook == Codebook::kE2m1 &&
                              problem.lhs == ElementType::kBf16 &&
                              ((problem.scale == ElementType::kE8m0 && problem.group_size == 32) ||
                               (problem.scale == ElementType::kE4m3 && problem.group_size == 16));
  if (is_microscaled) return microscaled;
  return kCodebookAtoms[static_cast<int>(problem.codebook)] + (merges ? kPlanesAtom : 0);
}

}  // namespace jaxlowbit
