// SPDX-License-Identifier: Apache-2.0
//
// Times the choices of every kernel: the raw data for tools/fit_costs.py, which fits the cost models.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::check {

// Shapes (n, k) of the layers of real models, large, small and odd ones, and numbers of rows.
const std::vector<std::pair<int64_t, int64_t>>& SweepLayers();
const std::vector<int64_t>& SweepRows();

// The standard sweep: all shapes in 4 bits with groups of 128 and in 8 bits per channel; small m also under PDL.
std::vector<QuantizedMatmul> StandardProblems();

// The current device and a problem as JSON. Fields are named as the arguments of `_ffi.select`; clusters are
// Device::clusters for 1, 2 and 4 CTAs.
std::string DeviceJson();
std::string ProblemJson(const QuantizedMatmul& problem, const Optional& optional);

// Choices as JSON: each is its numbers (NumbersOf), then its microseconds.
std::string ChoicesJson(const std::vector<Choice>& choices, const std::vector<float>& microseconds);

// Prints a JSON line per problem: device, problem, and microseconds of the choices worth timing. Starts no problem
// after `seconds`. Does not check results.
void TimeProblems(const std::vector<QuantizedMatmul>& problems, const Optional& optional,
                  double seconds);

}  // namespace jaxlowbit::check
