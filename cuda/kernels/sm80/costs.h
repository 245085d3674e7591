// SPDX-License-Identifier: Apache-2.0
//
// The constants of the cost of qmm_sm80: doubles alone, whose values tools/fit_costs.py fits and writes to costs.inc.
#pragma once

namespace jaxlowbit::sm80 {

struct Costs {
  struct Tile {
    double stage;   // microseconds of a stage of a CTA that has a multiprocessor to itself
    double shared;  // the fraction of it that CTAs of one multiprocessor cannot overlap
    double reduce;  // microseconds of the kernel that adds the partial sums
  };
  Tile tiles[3];  // of 8 and 16 rows, of 32, of 64
  double start;   // filling the ring, in stages
  // Partial sums of a row, in stages: 512 bytes, written and read, against 8 KiB of packed weights. They stay in L2, at
  // about twice the rate.
  double sums;
  // The cost, against other kernels, is a factor of what ranks the choices, and something once.
  struct Correction {
    double factor[2];  // 4 bits, 8 bits
    double once;
  };
  Correction corrections[3];  // tiles of 8 rows, of 16, of 32 and 64
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm80/costs.inc"
    ;

}  // namespace jaxlowbit::sm80
