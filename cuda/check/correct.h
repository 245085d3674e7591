// SPDX-License-Identifier: Apache-2.0
//
// Checks the result of a choice.
#pragma once

#include <cstdint>

#include "cuda/check/device_problem.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::check {

// Whether about `max_samples` elements of the result are within the bound, and the result repeats bit for bit. Prints
// failures.
bool IsCorrect(const QuantizedMatmul& problem, const DeviceProblem& data, const Choice& choice,
               int64_t max_samples);

}  // namespace jaxlowbit::check
