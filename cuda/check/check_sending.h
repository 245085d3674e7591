// SPDX-License-Identifier: Apache-2.0
//
// Checks products that send their results to other devices, and the normalizations that add them.
#pragma once

#include <utility>

namespace jaxlowbit::check {

// Compares bits with products and normalizations of one device. Devices are the GPUs of this machine, or all are GPU 0 if
// there are too few. Prints wrong cases. Returns the numbers of correct and wrong cases.
std::pair<int, int> CheckSending();

// Prints microseconds of two products and a normalization on two GPUs, whose rows the product or the normalization
// sends, with cold weights, in a CUDA graph on each GPU.
void TimeSending();

}  // namespace jaxlowbit::check
