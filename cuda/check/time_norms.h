// SPDX-License-Identifier: Apache-2.0
//
// `driver norms`: checks and times products that normalize their rows themselves, against a kernel in front of them.
#pragma once

#include <cstdint>
#include <utility>

namespace jaxlowbit::check {

// Counts of correct and wrong results of every `stride`-th case. A result is correct if it has the bits of separate
// kernels. Prints wrong ones, and how many launches merged a normalization.
std::pair<int, int> CheckNorms(uint64_t stride);

// Prints microseconds per layer of real models, without attention, with none, one or both normalizations of a layer merged.
void TimeNorms();

}  // namespace jaxlowbit::check
