// SPDX-License-Identifier: Apache-2.0
//
// The codebook kinds as an enum, for host and device code.
#pragma once

namespace jaxlowbit {

// kNone: integers. kTable: a table of numbers. kE2m1, kE4m3, kE5m2: quantized values are the bits of a float.
enum class Codebook { kNone, kTable, kE2m1, kE4m3, kE5m2 };

// Maximum width for table lookups in the CUDA kernels: one number per lane of a warp.
inline constexpr int kMaxTableBits = 5;

}  // namespace jaxlowbit
