// SPDX-License-Identifier: Apache-2.0
//
// The constants of the cost of qmm_sm90_stream: doubles alone, whose values tools/fit_costs.py fits and writes to
// costs.inc.
#pragma once

namespace jaxlowbit::sm90_stream {

struct Costs {
  struct Rows {
    double alone, beside;  // kilobytes per microsecond of a multiprocessor with one CTA, with two
    double two, three;     // factor of a ring of so many stages, over a deeper one
    double start;          // microseconds of the kernel's beginning and end
  };
  // Up to 8 rows of lhs in 4 bits, up to 16, up to 32; up to 8 in 8 bits, up to 16. 5 to 7 bits have those of 8.
  Rows rows[5];
  double
      narrow[3];  // rates of 1, 2 and 3 bits, over those of 4: fewer bits take as many instructions
  double copy;    // microseconds of half a slice of a stage, or of its lhs
  double tile;    // microseconds of the end of a tile
  double wave;    // microseconds of a wave
  double beside;  // microseconds, once, if two CTAs share a multiprocessor
  double read_kilobytes;  // the most of weights that are read in a microsecond
  // Microseconds that PDL saves if CTAs are alone on a multiprocessor, or two share one; and what is added if the next
  // kernel finds half of the multiprocessors idle, and begins there.
  double pdl_alone, pdl_beside, pdl_idle;
  double missing_row;  // microseconds of a row of a tensor-map tile that is out of bounds
};

inline constexpr Costs kCosts =
#include "cuda/kernels/sm90_stream/costs.inc"
    ;

}  // namespace jaxlowbit::sm90_stream
