// SPDX-License-Identifier: Apache-2.0
//
// Checks and times the exchange of rows between the GPUs of this machine.
#pragma once

#include <utility>

namespace jaxlowbit::check {

// Checks groups of 2 up to `most` GPUs: bits against a normalization on one GPU, with groups that wait for each other,
// and a peer that never sends. Prints wrong cases. Returns the numbers of correct and wrong cases.
std::pair<int, int> CheckExchange(int most);

// Prints microseconds of a normalization with and without an exchange, in a CUDA graph on each GPU.
void TimeExchange(int most);

}  // namespace jaxlowbit::check
