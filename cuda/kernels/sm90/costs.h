// SPDX-License-Identifier: Apache-2.0
//
// The constants of the cost of qmm_sm90: doubles alone, whose values tools/fit_costs.py fits and writes to costs.inc.
#pragma once

#include "cuda/kernels/sm90/plan.h"

namespace jaxlowbit::sm90 {

struct Costs {
  // Microseconds of a tile shape, but for two factors.
  struct Tile {
    double alone,
        beside;       // an atom of k in a CTA that has a multiprocessor to itself, or shares one
    double round;     // the beginning and the end of a tile
    double once;      // the beginning and the end of the kernel
    double split;     // the kernel that reduces the stream-K tail
    double megabyte;  // of partial sums
    double peers;     // multicast to cluster peers, over separate loads
    double wide;      // factor of an atom of 8 bits, over one of 4; 5 to 7 bits have it too
    double heat;      // added fraction for every doubling of the time, as clocks fall
  };
  Tile tiles[kNumTiles];
  // Factors of an atom whose scale is fused, and whose scale and zero are loaded once per stage.
  double fused, loaded_once;
  double read_bytes;  // the most bytes of weights that are read in a microsecond
  double cool;        // microseconds after which clocks fall
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm90/costs.inc"
    ;

}  // namespace jaxlowbit::sm90
