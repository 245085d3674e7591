// SPDX-License-Identifier: Apache-2.0
//
// What finding the numbers of codebooks, and merging bit planes, add to the costs of the kernels, which are fitted with
// integers of 4 and of 8 bits.
#pragma once

#include "cuda/problem.h"

namespace jaxlowbit {

// Microseconds of a multiprocessor that an atom of a strip takes more than one of integers of as many bits, in the order
// of Codebook: that of the instructions that find the numbers, at any number of rows
// (docs/measurements/codebooks.md).
inline constexpr double kCodebookAtoms[] = {0, 0.08, 0.06, 0.04, 0.028};

// Microseconds, likewise, that merging the planes of 5 to 7 bits adds to what as many bytes of 8 bits take
// (docs/measurements/widths_5_to_7.md).
inline constexpr double kPlanesAtom = 0.027;

// `microscaled`: what the kernel's atom takes in MXFP4 and NVFP4 with bfloat16, instead.
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
