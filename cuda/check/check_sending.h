// SPDX-License-Identifier: Apache-2.0
//
// Checks products that send their results to other devices, and the normalizations that add them.
#pragma once

#include <utility>

namespace jaxlowbit::check {

// Compares bits with products and normalizations of one device, for several devices that are all GPU 0, and for 2 up to
// `most` GPUs of this machine. Prints wrong cases. Returns the numbers of correct and wrong cases.
std::pair<int, int> CheckSending(int most);

// Prints microseconds of two products and a normalization on several GPUs, whose rows the product or the normalization
// sends, with cold weights, in a CUDA graph on each GPU.
void TimeSending();

}  // namespace jaxlowbit::check
