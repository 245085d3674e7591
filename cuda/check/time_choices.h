// SPDX-License-Identifier: Apache-2.0
//
// Times the choices of every kernel: the raw data for tools/fit_costs.py, which fits the cost models.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/problem.h"

namespace jaxlowbit::check {

// Shapes (n, k) of the layers of real models, large, small and odd ones, and numbers of rows.
const std::vector<std::pair<int64_t, int64_t>>& SweepLayers();
const std::vector<int64_t>& SweepRows();

// The standard sweep: all shapes in 4 bits with groups of 128 and in 8 bits per channel; small m also under PDL.
std::vector<QuantizedMatmul> StandardProblems();

// Prints a JSON line per problem: device, problem, and microseconds of the choices worth timing. Starts no problem
// after `seconds`. Does not check results.
void TimeProblems(const std::vector<QuantizedMatmul>& problems, const Optional& optional,
                  double seconds);

}  // namespace jaxlowbit::check
