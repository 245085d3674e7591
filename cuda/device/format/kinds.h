// SPDX-License-Identifier: Apache-2.0
//
// The codebook kinds as an enum, for host and device code.
#pragma once

namespace jaxlowbit {

// Codebooks: enumerator, name, width (0: several), exponent bits, and the cost of decoding: microseconds per atom and
// strip on one SM in addition to integers of the same width, independent of m (docs/measurements/codebooks.md).
// kNone: integers. kTable: a table of numbers. Others: quantized values are the bits of a float.
#define JAXLOWBIT_CODEBOOKS(CODEBOOK)   \
  CODEBOOK(kNone, "none", 0, 0, 0)      \
  CODEBOOK(kTable, "table", 0, 0, 0.08) \
  CODEBOOK(kE2m1, "e2m1", 4, 2, 0.06)   \
  CODEBOOK(kE4m3, "e4m3", 8, 4, 0.04)   \
  CODEBOOK(kE5m2, "e5m2", 8, 5, 0.028)

#define JAXLOWBIT_ENUMERATOR(enumerator, name, bits, exponent_bits, cost) enumerator,
enum class Codebook { JAXLOWBIT_CODEBOOKS(JAXLOWBIT_ENUMERATOR) };
#undef JAXLOWBIT_ENUMERATOR

// Maximum width for table lookups in the CUDA kernels: one number per lane of a warp.
inline constexpr int kMaxTableBits = 5;

}  // namespace jaxlowbit
