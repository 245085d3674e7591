// SPDX-License-Identifier: Apache-2.0
//
// Two 16-bit floats in one register: their arithmetic, and powers of two.
//
// Multiplication is fma with -0, which exists for bf16 on sm_80 and preserves the sign of zero products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxlowbit {

// Two 16-bit floats in one register, with the float type's own arithmetic.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static constexpr uint32_t kOne = 0x3f803f80;
  static constexpr int kMantissaBits = 7, kBias = 127;
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
  static constexpr int kMantissaBits = 10, kBias = 15;
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

// 2^exponent as a T, in the low half.
template <typename T>
__host__ __device__ constexpr uint32_t PowerOfTwo(int exponent) {
  return static_cast<uint32_t>(exponent + Pair<T>::kBias) << Pair<T>::kMantissaBits;
}
// 2^exponent in both halves.
template <typename T>
__host__ __device__ constexpr uint32_t PowersOfTwo(int exponent) {
  return PowerOfTwo<T>(exponent) * 0x00010001u;
}

// 2^exponent as the bits of a float32.
__host__ __device__ constexpr uint32_t PowerOfTwoFloat(int exponent) {
  return static_cast<uint32_t>(exponent + 127) << 23;
}

// Subnormal Ts are integers times 2^kSubnormalUnit, so the bits of an integer are a subnormal T.
template <typename T>
inline constexpr int kSubnormalUnit = 1 - Pair<T>::kBias - Pair<T>::kMantissaBits;

// Puts each of a pair of values, of rows g and g + 8, into both halves of a register.
__device__ inline void Duplicate(uint32_t both, uint32_t (&rows)[2]) {
  rows[0] = __byte_perm(both, both, 0x1010);
  rows[1] = __byte_perm(both, both, 0x3232);
}

// Duplicate for factors of Multiply. If the compiler recognizes the halves, the multiplication broadcasts them itself.
__device__ inline void RepeatHalves(uint32_t both, uint32_t (&rows)[2]) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\nmov.b32 %0, {low, low};\n"
      "mov.b32 %1, {high, high};\n}\n"
      : "=r"(rows[0]), "=r"(rows[1])
      : "r"(both));
}

template <typename T>
__device__ inline uint32_t Multiply(uint32_t a, uint32_t b) {
  return Pair<T>::Fma(a, b, kNegativeZeros);
}

}  // namespace jaxlowbit
