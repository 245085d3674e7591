// SPDX-License-Identifier: Apache-2.0
//
// The constants of the cost of qmm_sm80: doubles alone, whose values tools/fit_costs.py fits and writes to costs.inc.
#pragma once

namespace jaxlowbit::sm80 {

struct Costs {
  struct Tile {
    // Microseconds of a stage of a CTA alone on a multiprocessor; 4 bits, 8 bits. 5 to 7 bits have those of 8.
    double stage[2];
    double shared;  // the fraction of it that CTAs of one multiprocessor cannot overlap
    double reduce;  // microseconds of the kernel that adds the partial sums
    double once;    // microseconds of the kernel's beginning and end
  };
  Tile tiles[4];  // of kBlockMs
  double start;   // filling the ring, in stages
  // Partial sums of a row, in stages: 512 bytes, written and read, against 8 KiB of packed weights. They stay in L2, at
  // about twice the rate.
  double sums;
  double read_bytes;  // the most bytes of weights that are read in a microsecond
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm80/costs.inc"
    ;

}  // namespace jaxlowbit::sm80
