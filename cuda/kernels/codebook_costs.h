// SPDX-License-Identifier: Apache-2.0
//
// What codebooks add to the costs of the kernels, which are fitted with integers.
#pragma once

#include "cuda/types.h"

namespace jaxlowbit {

// Microseconds of a multiprocessor that an atom of a strip takes more than one of integers of as many bits, in the order
// of Codebook: that of the instructions that find the numbers, at any number of rows
// (docs/measurements/codebooks.md).
inline constexpr double kCodebookAtoms[] = {0, 0.08, 0.06, 0.04, 0.028};

constexpr double CodebookAtom(Codebook codebook) {
  return kCodebookAtoms[static_cast<int>(codebook)];
}

}  // namespace jaxlowbit
