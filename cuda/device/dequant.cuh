// SPDX-License-Identifier: Apache-2.0
//
// Codes to weights in registers: w = (q - z) * s, rounded once, bit for bit the definition.
//
// No integer-to-float conversion is executed. An integer below 2^m placed in the mantissa of a
// float is that float's value plus a constant (bf16 0x4300 | q = 128 + q for q < 128; f16 0x6400 |
// q = 1024 + q for q < 1024), so one logic instruction and one fma give q - z exactly in two
// halves. The 8 bits of a code do not fit beside bf16's 7 bits of mantissa: there the code itself
// is read as a (subnormal) bf16, q * 2^-133, which is linear in q up to 255, and scaled up in two
// exact steps. The idea of the first form is FasterTransformer's, of the second TurboMind's.
//
// Multiplications are written as fma with -0, which sm_80 has for bf16 too and which keeps the sign
// of a zero product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/copy.cuh"
#include "cuda/device/layout.cuh"

namespace jaxlowbit {

// (a & b) | c in one instruction.
__device__ inline uint32_t AndOr(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two 16-bit floats in one register, with the float type's own arithmetic.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static constexpr uint32_t kOne = 0x3f803f80;
  static constexpr int kMantissaBits = 7;
  static constexpr uint32_t kMagic = 0x43004300;  // 128 in both halves: | q adds q < 128
  static __device__ uint32_t Fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
  static __device__ uint32_t Round(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
};

template <>
struct Pair<__half> {
  static constexpr uint32_t kOne = 0x3c003c00;
  static constexpr int kMantissaBits = 10;
  static constexpr uint32_t kMagic = 0x64006400;  // 1024 in both halves: | q adds q < 1024
  static __device__ uint32_t Fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ float Low(uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(pair)));
  }
  static __device__ float High(uint32_t pair) { return Low(pair >> 16); }
  static __device__ uint32_t Round(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
};

inline constexpr uint32_t kNegativeZeros = 0x80008000;

template <typename T>
__device__ inline uint32_t Multiply(uint32_t a, uint32_t b) {
  return Pair<T>::Fma(a, b, kNegativeZeros);
}

// Whether codes are read as subnormals instead of beside the mantissa bits of a constant.
template <typename T, int kBits>
inline constexpr bool kSubnormal = kBits > Pair<T>::kMantissaBits;

// Minus the zero point of one row, in both halves, with what Unpack's first step adds or scales.
template <typename T, int kBits>
struct Centre {
  static constexpr float k2ToMinus6 = 1.0f / 64;

  uint32_t value;

  static __device__ Centre Of(int zero) {
    if constexpr (kSubnormal<T, kBits>) {
      const float centre = -k2ToMinus6 * static_cast<float>(zero);
      return {Pair<T>::Round(centre, centre)};
    } else {
      // The constant, its sign and a zero point in the mantissa: -(constant + zero).
      return {(Pair<T>::kMagic | 0x80008000) + zero * 0x00010001u};
    }
  }
};

// q - z, exactly, of the four registers of one step: rows g and g + 8 alternate (layout.cuh).
template <typename T, int kBits>
__device__ inline void Unpack(const uint32_t (&words)[kWordsPerStep<kBits>],
                              const Centre<T, kBits> (&centre)[2], uint32_t (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = kBits == 4 ? words[0] >> 4 * j : words[j / 2] >> 8 * (j % 2);
    constexpr uint32_t kMask = kBits == 4 ? 0x000f000f : 0x00ff00ff;
    if constexpr (kSubnormal<T, kBits>) {
      constexpr uint32_t k2To127 = 0x7f007f00, k2To6 = 0x42804280;
      const uint32_t shrunk = Pair<T>::Fma(word & kMask, k2To127, centre[j % 2].value);
      out[j] = Multiply<T>(shrunk, k2To6);
    } else {
      out[j] =
          Pair<T>::Fma(AndOr(word, kMask, Pair<T>::kMagic), Pair<T>::kOne, centre[j % 2].value);
    }
  }
}

// Codes to integers for sums that are scaled afterwards: (q - z) * 2^-kShift, exactly. With bf16 the
// codes are read as subnormals where they stand, which takes no shift for every other one. Of the
// powers of two that this offers, 2^-12 keeps the sum of an atom's products in float32 from
// overflowing at the top of bf16's range, and from losing bits at the bottom.
template <typename T>
inline constexpr int kShift = 0;
template <>
inline constexpr int kShift<__nv_bfloat16> = 12;

// The same for integers that are scaled at once. 2^-6 is the largest that can be had; weights that
// much smaller lose bits only where float32 sums may too.
template <typename T>
inline constexpr int kWeightShift = 0;
template <>
inline constexpr int kWeightShift<__nv_bfloat16> = 6;

// Minus the zero point of one row, in both halves, with what UnpackIntegers adds; times 2^-kDown.
template <typename T, int kDown = kShift<T>>
struct IntegerCentre;

template <int kDown>
struct IntegerCentre<__nv_bfloat16, kDown> {
  uint32_t value;
  static __device__ IntegerCentre Of(int zero) {
    const float centre = static_cast<float>(zero) * (-1.0f / (1 << kDown));
    return {Pair<__nv_bfloat16>::Round(centre, centre)};
  }
  // `code`: a pair of codes, 2^kUp times as large.
  template <int kUp>
  __device__ uint32_t Subtract(uint32_t code) const {
    // Exponents of bf16: subnormals are in units of 2^-133.
    constexpr uint32_t kExponent = 133 - kDown - kUp + 127, kBoth = 0x00800080;
    return Pair<__nv_bfloat16>::Fma(code, kExponent * kBoth, value);
  }
};

template <>
struct IntegerCentre<__half, 0> {
  uint32_t value, raised;  // the second for codes that are 2^4 times as large
  static __device__ IntegerCentre Of(int zero) {
    return {(Pair<__half>::kMagic | 0x80008000) + zero * 0x00010001u,
            (0x54005400 | 0x80008000) + zero * 0x00100010u};  // -(64 + zero)
  }
  template <int kUp>
  __device__ uint32_t Subtract(uint32_t code) const {
    const uint32_t magic = code | Pair<__half>::kMagic;
    if constexpr (kUp == 0) return Pair<__half>::Fma(magic, Pair<__half>::kOne, value);
    constexpr uint32_t k2ToMinus4 = 0x2c002c00;
    return Pair<__half>::Fma(magic, k2ToMinus4, raised);
  }
};

// The four registers of one step: rows g and g + 8 alternate (layout.cuh).
template <typename T, int kBits, int kDown>
__device__ inline void UnpackIntegers(const uint32_t (&words)[kWordsPerStep<kBits>],
                                      const IntegerCentre<T, kDown> (&centre)[2],
                                      uint32_t (&out)[4]) {
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    if constexpr (kBits == 4) {
      const uint32_t word = v == 0 ? words[0] : words[0] >> 8;
      out[2 * v] = centre[0].template Subtract<0>(word & 0x000f000f);
      out[2 * v + 1] = centre[1].template Subtract<4>(word & 0x00f000f0);
    } else {
      out[2 * v] = centre[0].template Subtract<0>(words[v] & 0x00ff00ff);
      out[2 * v + 1] = centre[1].template Subtract<0>(words[v] >> 8 & 0x00ff00ff);
    }
  }
}

// The scale, or the float zero, of one row. Of the activation's own type they work in that type; in
// float32 the result is rounded to the activation's type. Either way it is rounded once. Without a
// float zero, -0 is added, which changes nothing, the sign of a zero included.
template <typename T, typename S>
struct RowScale;

template <typename T>
struct RowScale<T, T> {
  uint32_t value;  // in both halves
  static __device__ RowScale NegativeZero() { return {kNegativeZeros}; }
  // Of rows g and g + 8, neighbours in shared memory (layout.cuh).
  static __device__ void LoadPair(uint32_t shared, RowScale (&rows)[2]) {
    const uint32_t both = LoadShared4(shared);
    rows[0].value = __byte_perm(both, both, 0x1010);
    rows[1].value = __byte_perm(both, both, 0x3232);
  }
  // Times 2^-kDown.
  template <int kDown>
  __device__ void Shrink() {
    constexpr float kFactor = 1.0f / (1 << kDown);
    value = Multiply<T>(value, Pair<T>::Round(kFactor, kFactor));
  }
  __device__ uint32_t MultiplyAdd(uint32_t integers, RowScale offset) const {
    return Pair<T>::Fma(integers, value, offset.value);
  }
};

template <typename T>
struct RowScale<T, float> {
  float value;
  static __device__ RowScale NegativeZero() { return {-0.0f}; }
  static __device__ void LoadPair(uint32_t shared, RowScale (&rows)[2]) {
    rows[0].value = __uint_as_float(LoadShared4(shared));
    rows[1].value = __uint_as_float(LoadShared4(shared + 4));
  }
  template <int kDown>
  __device__ void Shrink() {
    value *= 1.0f / (1 << kDown);
  }
  __device__ uint32_t MultiplyAdd(uint32_t integers, RowScale offset) const {
    return Pair<T>::Round(fmaf(Pair<T>::Low(integers), value, offset.value),
                          fmaf(Pair<T>::High(integers), value, offset.value));
  }
};

}  // namespace jaxlowbit
