// SPDX-License-Identifier: Apache-2.0
//
// The ahead-of-time instances of qmm_sm90_stream.
#pragma once

#include "cuda/kernels/sm90_stream/plan.h"
#include "cuda/problem.h"

namespace jaxlowbit::sm90_stream {

struct Params;
using KernelFunction = void (*)(Params);

// What an instance is compiled for besides the types of a problem.
struct Variant {
  int block_m, ctas_per_sm;
  bool gathers;

  constexpr bool operator==(const Variant& other) const {
    return block_m == other.block_m && ctas_per_sm == other.ctas_per_sm && gathers == other.gathers;
  }
};

// Instances for 8 rows need no more registers if they have a multiprocessor to themselves. Only those gather lhs.
inline constexpr Variant kVariants[] = {
    {8, kMaxCtasPerSm, false},  {8, kMaxCtasPerSm, true}, {16, 1, false},
    {16, kMaxCtasPerSm, false}, {32, 1, false},           {32, kMaxCtasPerSm, false}};

// The instance for the types of `problem`, or null if there is none.
KernelFunction Find(const QuantizedMatmul& problem, const Variant& variant);

}  // namespace jaxlowbit::sm90_stream
