// SPDX-License-Identifier: Apache-2.0
//
// The ahead-of-time instances of qmm_sm80.
#pragma once

#include "cuda/problem.h"

namespace jaxlowbit::sm80 {

struct Params;
using KernelFunction = void (*)(Params);

// The instance for the types of `problem` and tiles of `block_m` rows, or null.
KernelFunction Find(const QuantizedMatmul& problem, int block_m);

}  // namespace jaxlowbit::sm80
