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
  const bool e4m3 = codebook == Codebook::kE4m3, e5m2 = codebook == Codebook::kE5m2;
  const int exponent_bits = e5m2 ? 5 : e4m3 ? 4 : 2, mantissa_bits = e5m2 ? 2 : e4m3 ? 3 : 1;
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

// Returns whether the 2^kBits numbers equal this float codebook. The codebook's numbers are cached: every call asks.
template <Codebook kCodebook, int kBits>
bool IsCodebook(const float* numbers) {
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
  if (bits == 4 && IsCodebook<Codebook::kE2m1, 4>(numbers)) return Codebook::kE2m1;
  if (bits == 8 && IsCodebook<Codebook::kE4m3, 8>(numbers)) return Codebook::kE4m3;
  if (bits == 8 && IsCodebook<Codebook::kE5m2, 8>(numbers)) return Codebook::kE5m2;
  return Codebook::kTable;
}

}  // namespace jaxlowbit
