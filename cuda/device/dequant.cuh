// SPDX-License-Identifier: Apache-2.0
//
// Converts quantized values to weights in registers: w = (q - z) * s, rounded once, bit-identical to the definition.
//
// There are no integer-to-float conversions. OR-ing an integer below 2^m into the mantissa of a constant adds it to the
// constant (bf16: 0x4300 | q = 128 + q for q < 128; f16: 0x6400 | q = 1024 + q for q < 1024), so one logic instruction
// and one fma compute q - z exactly in both halves (FasterTransformer). 8 bits do not fit bf16's 7 mantissa bits: there
// q itself is a subnormal bf16, q * 2^-133 for all q up to 255, and is scaled up in two exact steps (TurboMind).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/format/integer.cuh"
#include "cuda/device/pair.cuh"

namespace jaxlowbit {

// (a & b) | c in one instruction.
__device__ inline uint32_t AndOr(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Whether quantized values are read as subnormals instead of being OR-ed into a constant.
template <typename T, int kBits>
inline constexpr bool kSubnormal = kBits > Pair<T>::kMantissaBits;

// Minus the zero point of one row, in both halves, including the constant or the factor of Unpack's first step.
template <typename T, int kBits>
struct ZeroPoint {
  static constexpr float k2ToMinus6 = 1.0f / 64;

  uint32_t value;

  static __device__ ZeroPoint Of(int zero) {
    if constexpr (kSubnormal<T, kBits>) {
      const float zero_point = -k2ToMinus6 * static_cast<float>(zero);
      return {Pair<T>::Round(zero_point, zero_point)};
    } else {
      // -(constant + zero): the constant with its sign bit and the zero point in the mantissa.
      return {(Pair<T>::kMagic | 0x80008000) + zero * 0x00010001u};
    }
  }
};

// Computes q - z, exactly, for the four registers of a step: rows g and g + 8 alternate.
template <typename T, int kBits>
__device__ inline void Unpack(const uint32_t (&packed)[kBits], int step,
                              const ZeroPoint<T, kBits> (&zero_point)[2], uint32_t (&out)[4]) {
  using F = Integer<kBits>;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = F::Word(packed, step, j / 2) >> (F::Shift(step, j / 2) + j % 2 * F::kUp);
    if constexpr (kSubnormal<T, kBits>) {
      constexpr uint32_t k2To127 = 0x7f007f00, k2To6 = 0x42804280;
      const uint32_t shrunk =
          Pair<T>::Fma(word & kValueMask<kBits>, k2To127, zero_point[j % 2].value);
      out[j] = Multiply<T>(shrunk, k2To6);
    } else {
      out[j] = Pair<T>::Fma(AndOr(word, kValueMask<kBits>, Pair<T>::kMagic), Pair<T>::kOne,
                            zero_point[j % 2].value);
    }
  }
}

// SeparateValues leaves the values of row g + 8 in place, so they are multiplied by 2^kSecondUp. Values in separate
// bytes (kUp = 8) are moved instead, since they would not fit the mantissa of a constant.
template <int kBits>
inline constexpr int kSecondUp = Integer<kBits>::kUp == 8 ? 0 : Integer<kBits>::kUp;

// The right shift of the values of row g + 8 in SeparateValues.
template <int kBits>
inline constexpr int kSecondDown = Integer<kBits>::kUp - kSecondUp<kBits>;

// Separates the quantized values of a step in place: rows g and g + 8 alternate.
template <int kBits>
__device__ inline void SeparateValues(const uint32_t (&packed)[kBits], int step,
                                      uint32_t (&values)[4]) {
  using F = Integer<kBits>;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint32_t word = F::Word(packed, step, v) >> F::Shift(step, v);
    values[2 * v] = word & kValueMask<kBits>;
    // 8 bits: bytes 1 and 3.
    values[2 * v + 1] = kBits == 8
                            ? __byte_perm(word, 0, 0x5351)
                            : word >> kSecondDown<kBits> & kValueMask<kBits> << kSecondUp<kBits>;
  }
}

// LiftValues separates values for f16 at the highest bits that keep them an integer times the smallest subnormal
// (subnormal or the smallest exponent): row g starts at bit kLifted, row g + 8 kSecondUp bits above.
template <int kBits>
inline constexpr int kLifted = 11 - kBits - kSecondUp<kBits>;

template <int kBits>
__device__ inline void LiftValues(const uint32_t (&packed)[kBits], int step,
                                  uint32_t (&values)[4]) {
  using F = Integer<kBits>;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint32_t lifted = ShiftUp(F::Word(packed, step, v), kLifted<kBits> - F::Shift(step, v));
    values[2 * v] = lifted & kValueMask<kBits> << kLifted<kBits>;
    values[2 * v + 1] = lifted & kValueMask<kBits> << (kLifted<kBits> + kSecondUp<kBits>);
  }
}

// If scales multiply accumulators, quantized values become (q - z) * 2^-kShift, exactly. Reading them in place as
// subnormals saves a shift for every other value. In bf16, 2^-12 keeps the float32 sum of an atom's products from
// overflowing at the top of bf16's range and from losing bits at the bottom. In f16, 2^-9 is the largest possible
// factor.
template <typename T>
inline constexpr int kShift = 9;
template <>
inline constexpr int kShift<__nv_bfloat16> = 12;

// The shift if scales multiply weights. In bf16, 2^-6 is the largest possible factor; such weights lose bits only where
// float32 accumulators may lose bits too. In f16 they would lose more, so there is no shift.
template <typename T>
inline constexpr int kWeightShift = 0;
template <>
inline constexpr int kWeightShift<__nv_bfloat16> = 6;

// Minus the zero point of one row, in both halves, times 2^-kDown. `kRaised`: the width's kSecondUp.
template <typename T, int kDown, int kRaised>
struct IntegerZeroPoint {
  static constexpr uint32_t kWith = 0;  // OR-ed with the quantized values

  uint32_t value;

  // `zeros`: the zero point in both halves.
  static __device__ IntegerZeroPoint Of(uint32_t zeros) {
    return {Multiply<T>(zeros, PowersOfTwo<T>(-kSubnormalUnit<T> - kDown) | kNegativeZeros)};
  }
  static __device__ IntegerZeroPoint OfPowerOfTwo(int exponent) {
    return {PowersOfTwo<T>(exponent - kDown) | kNegativeZeros};
  }
  // `quantized`: a pair of quantized values times 2^up.
  __device__ uint32_t Subtract(uint32_t quantized, int up) const {
    return Pair<T>::Fma(quantized, PowersOfTwo<T>(-kSubnormalUnit<T> - kDown - up), value);
  }
};

// f16 without a shift: subnormals cannot be used, so quantized values are OR-ed into 1024.
template <int kRaised>
struct IntegerZeroPoint<__half, 0, kRaised> {
  static constexpr uint32_t kWith = Pair<__half>::kMagic;

  // Includes 1024; `raised`, for quantized values times 2^kRaised, includes 1024 * 2^-kRaised.
  uint32_t value, raised;

  static __device__ IntegerZeroPoint Of(uint32_t zeros) {
    return {(PowersOfTwo<__half>(10) | kNegativeZeros) + zeros,
            (PowersOfTwo<__half>(10 - kRaised) | kNegativeZeros) + (zeros << kRaised)};
  }
  static __device__ IntegerZeroPoint OfPowerOfTwo(int exponent) {
    return Of(0x00010001u << exponent);
  }
  // `up`: 0 or kRaised.
  __device__ uint32_t Subtract(uint32_t quantized, int up) const {
    return Pair<__half>::Fma(quantized, PowersOfTwo<__half>(-up), up == 0 ? value : raised);
  }
};

// Computes (q - z) * 2^-kDown for the four registers of a step: rows g and g + 8 alternate. Values read as subnormals
// may be anywhere in the low byte of a half, so words need only byte shifts.
template <typename T, int kBits, int kDown>
__device__ inline void UnpackIntegers(
    const uint32_t (&packed)[kBits], int step,
    const IntegerZeroPoint<T, kDown, kSecondUp<kBits>> (&zero_point)[2], uint32_t (&out)[4]) {
  using F = Integer<kBits>;
  constexpr uint32_t kWith = IntegerZeroPoint<T, kDown, kSecondUp<kBits>>::kWith;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int shift = F::Shift(step, j / 2), moved = kWith == 0 ? shift / 8 * 8 : shift;
    const int up = shift - moved + j % 2 * kSecondUp<kBits>;
    const uint32_t word = F::Word(packed, step, j / 2) >> moved;
    // Bytes 1 and 3 of 8 bits, each below the upper byte of kWith.
    const uint32_t value = kBits == 8 && j % 2 == 1 ? __byte_perm(word, kWith, 0x5351)
                                                    : AndOr(word >> j % 2 * kSecondDown<kBits>,
                                                            kValueMask<kBits> << up, kWith);
    out[j] = zero_point[j % 2].Subtract(value, up);
  }
}

}  // namespace jaxlowbit
