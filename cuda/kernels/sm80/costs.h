// SPDX-License-Identifier: Apache-2.0
//
// The constants of qmm_sm80's cost model: only doubles, which tools/fit_costs.py fits and writes to costs.inc.
#pragma once

namespace jaxlowbit::sm80 {

struct Costs {
  struct Tile {
    // Microseconds per stage if a multiprocessor runs a single CTA, for 4 and 8 bits; 5 to 7 bits use the latter.
    double stage[2];
    double shared;  // the fraction that CTAs of one multiprocessor cannot overlap
    double reduce;  // microseconds of the kernel that adds the partial sums
    double once;    // microseconds of the kernel's beginning and end
  };
  Tile tiles[4];  // of kBlockMs
  double start;   // filling the ring, in stages
  // Cost of a row's partial sums, in stages: 512 bytes, written and read, compared to 8 KiB of packed weights. They
  // stay in L2, which has about twice the bandwidth.
  double sums;
  double read_bytes;  // peak weight bandwidth, bytes per microsecond
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm80/costs.inc"
    ;

}  // namespace jaxlowbit::sm80
