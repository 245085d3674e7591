// SPDX-License-Identifier: Apache-2.0
//
// What quantized values stand for, as a value: host and device compile this header.
#pragma once

namespace jaxlowbit {

// Integers, a table of numbers, or the floats whose bits they are.
enum class Codebook { kNone, kTable, kE2m1, kE4m3, kE5m2 };

// The widest values that the CUDA kernels look up in a table: a warp has a number in each lane.
inline constexpr int kMostTableBits = 5;

}  // namespace jaxlowbit
