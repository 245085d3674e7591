// SPDX-License-Identifier: Apache-2.0
//
// Converts bf16 and f16 to and from float32, and 8-bit scales to float32. Integer arithmetic without branches lets
// loops vectorize on every machine; no float32 subnormals, which XLA's threads flush to zero.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jaxlowbit {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E8m0 {
  uint8_t bits;
};
struct E4m3 {
  uint8_t bits;
};

inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline constexpr uint32_t kF32Infinity = 0x7f800000;
inline constexpr uint32_t kF32Nan = 0x7fc00000;
inline constexpr uint32_t kF16Infinity = 0x7c00;
inline constexpr uint32_t kRebias = (127 - 15) << 23;  // between the exponents of f16 and float32
inline constexpr uint32_t kF16Smallest = (127 - 14) << 23;  // the smallest normal f16, as float32
inline constexpr uint32_t kE4m3Smallest = (127 - 6) << 23;  // the smallest normal e4m3

inline float ToFloat(float value) { return value; }
inline float ToFloat(uint8_t value) { return static_cast<float>(value); }
inline float ToFloat(Bf16 value) { return BitsToFloat(uint32_t{value.bits} << 16); }

inline float ToFloat(F16 value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t wide = magnitude << 13;
  const uint32_t normal = wide + kRebias + (magnitude >= kF16Infinity ? kRebias : 0);
  const uint32_t subnormal =
      FloatToBits(BitsToFloat(kF16Smallest + wide) - BitsToFloat(kF16Smallest));
  return BitsToFloat(sign | (magnitude < 0x400 ? subnormal : normal));
}

// 2^(code - 127), but 2^-126 for the subnormal 2^-127 (Coefficients in clone/dequantize.inc). The last code is NaN.
inline float ToFloat(E8m0 value) {
  const uint32_t code = value.bits, is_nan = (code + 1) >> 8;
  return BitsToFloat(std::max(code, 1u) << 23 | is_nan << 22);
}

inline float ToFloat(E4m3 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t sign = (value.bits & 0x80u) << 24;
  const uint32_t is_nan = (magnitude + 1) >> 7, is_subnormal = (magnitude - 8) >> 31;  // 0 or 1
  // A subnormal number is the smallest normal number with its mantissa minus the smallest normal number.
  const uint32_t bits = (magnitude << 20) + ((127u - 7 + is_subnormal) << 23);
  const float finite = BitsToFloat(bits) - BitsToFloat(kE4m3Smallest & (0 - is_subnormal));
  return BitsToFloat(FloatToBits(finite) | sign | (kF32Nan & (0 - is_nan)));
}

// Rounds to nearest even; NaN stays NaN.
template <typename T>
T FromFloat(float value);

template <>
inline float FromFloat<float>(float value) {
  return value;
}

template <>
inline Bf16 FromFloat<Bf16>(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > kF32Infinity ? nan : rounded)};
}

template <>
inline F16 FromFloat<F16>(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // One unit of 0.5 in float32 is the smallest subnormal f16: the addition rounds.
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0.5f) - FloatToBits(0.5f);
  const uint32_t finite = magnitude < kF16Smallest ? subnormal : normal;
  const uint32_t special = magnitude > kF32Infinity ? kF16Infinity | 0x200 : kF16Infinity;
  const uint32_t two_to_16 = (127 + 16) << 23;
  return {
      static_cast<uint16_t>((bits >> 16 & 0x8000) | (magnitude < two_to_16 ? finite : special))};
}

}  // namespace jaxlowbit
