// SPDX-License-Identifier: Apache-2.0
//
// The ahead-of-time instances of qmm_sm80_transposed. Geometry, parameters, selection and launch are qmm_sm80's.
#pragma once

#include "cuda/kernels/sm80/instances.h"

namespace jaxlowbit::sm80_transposed {

// The instance for the types of `problem` and tiles of `block_m` rows, or null.
sm80::KernelFunction Find(const QuantizedMatmul& problem, int block_m);

}  // namespace jaxlowbit::sm80_transposed
