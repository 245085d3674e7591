// SPDX-License-Identifier: Apache-2.0
//
// Identifies the kind of a codebook from its numbers, which are all that calls and buffers contain.
#pragma once

#include <array>
#include <cmath>
#include <limits>

#include "cuda/types.h"

namespace jaxlowbit {

// Value of a code in a float codebook: sign, exponent bits, mantissa bits.
inline float NumberOf(Codebook codebook, int code) {
#define JAXLOWBIT_EXPONENT(enumerator, name, bits, exponent_bits, cost) exponent_bits,
  constexpr int kExponentBits[] = {JAXLOWBIT_CODEBOOKS(JAXLOWBIT_EXPONENT)};
#undef JAXLOWBIT_EXPONENT
  const bool e4m3 = codebook == Codebook::kE4m3, e5m2 = codebook == Codebook::kE5m2;
  const int exponent_bits = kExponentBits[static_cast<int>(codebook)];
  const int mantissa_bits = BitsOf(codebook) - 1 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1, units = 1 << mantissa_bits;
  const int mantissa = code % units, exponent = code / units % (1 << exponent_bits);
  const bool last = exponent == (1 << exponent_bits) - 1;
  float magnitude = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : units + mantissa),
                               (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
  if (last && e5m2 && mantissa == 0) magnitude = std::numeric_limits<float>::infinity();
  if (last && ((e5m2 && mantissa != 0) || (e4m3 && mantissa == units - 1))) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  }
  return code >> (exponent_bits + mantissa_bits) != 0 ? -magnitude : magnitude;
}

// Returns whether the 2^bits numbers equal this float codebook. The codebook's numbers are cached: every call asks.
template <Codebook kCodebook>
bool IsCodebook(const float* numbers) {
  constexpr int kBits = BitsOf(kCodebook);
  static const auto own_numbers = [] {
    std::array<float, 1 << kBits> own;
    for (int code = 0; code < 1 << kBits; ++code) own[code] = NumberOf(kCodebook, code);
    return own;
  }();
  for (const float own : own_numbers) {
    const float other = *numbers++;
    const bool same = std::isnan(own) ? std::isnan(other)
                                      : own == other && std::signbit(own) == std::signbit(other);
    if (!same) return false;
  }
  return true;
}

// Kind of a codebook of 2^bits numbers, or kNone (integers) for null.
inline Codebook CodebookOf(const float* numbers, int bits) {
  if (numbers == nullptr) return Codebook::kNone;
#define JAXLOWBIT_IF(enumerator, name, width, exponent_bits, cost)              \
  if (width != 0 && bits == width && IsCodebook<Codebook::enumerator>(numbers)) \
    return Codebook::enumerator;
  JAXLOWBIT_CODEBOOKS(JAXLOWBIT_IF)
#undef JAXLOWBIT_IF
  return Codebook::kTable;
}

}  // namespace jaxlowbit
