// SPDX-License-Identifier: Apache-2.0
//
// The constants of qmm_sm90's cost model: only doubles, which tools/fit_costs.py fits and writes to costs.inc.
#pragma once

#include "cuda/kernels/sm90/plan.h"

namespace jaxlowbit::sm90 {

struct Costs {
  // Microseconds, except `wide` and `throttling`.
  struct Tile {
    double one_cta, two_ctas;  // per atom of k, with one or two CTAs per SM
    double round;              // start and end of a tile
    double once;               // start and end of the kernel
    double split;              // the kernel that reduces the stream-K tail
    double megabyte;           // of partial sums
    double peers;              // multicast to cluster peers, compared to separate loads
    double wide;               // factor of 5 to 8 bits per atom, relative to 4
    double throttling;         // added fraction per doubling of the time, as clocks drop
  };
  Tile tiles[kNumTiles];
  // Factors per atom if the scale is fused, or if scale and zero are loaded once per stage.
  double fused, loaded_once;
  double read_bytes;      // peak weight bandwidth, bytes per microsecond
  double throttle_start;  // clocks drop in products longer than this, in microseconds
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm90/costs.inc"
    ;

}  // namespace jaxlowbit::sm90
