// SPDX-License-Identifier: Apache-2.0
//
// The constants of qmm_sm90_stream's cost model: only doubles, which tools/fit_costs.py fits and writes to costs.inc.
#pragma once

namespace jaxlowbit::sm90_stream {

struct Costs {
  struct Rows {
    // Kilobytes per microsecond and SM, with one or two CTAs per SM.
    double one_cta, two_ctas;
    double two, three;  // time factor of a ring of 2 or 3 stages, relative to deeper rings
    double start;       // microseconds at the start and end of the kernel
  };
  // 4 bits: up to 8, 16, 32 rows of lhs; 8 bits: up to 8, 16. 5 to 7 bits use the values of 8.
  Rows rows[5];
  // Rates of 1, 2 and 3 bits relative to 4: the number of instructions is the same.
  double narrow[3];
  double copy;            // microseconds per half slice of a stage, and per lhs of a stage
  double tile;            // microseconds at the end of a tile
  double wave;            // microseconds per wave
  double two_ctas;        // microseconds per launch with two CTAs per SM
  double read_kilobytes;  // peak weight bandwidth, kilobytes per microsecond
  // Microseconds that PDL saves with one or two CTAs per SM; additional savings if half of the SMs are idle, so that
  // the next kernel starts there.
  double pdl_one_cta, pdl_two_ctas, pdl_idle;
  double missing_row;  // microseconds per out-of-bounds row of a tensor-map tile
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm90_stream/costs.inc"
    ;

}  // namespace jaxlowbit::sm90_stream
