// SPDX-License-Identifier: Apache-2.0
//
// Loads and converts scales of rows g and g + 8: 32-bit or 16-bit floats, the 8-bit scales of the microscaling formats,
// integers from 0 to 127, or two-level scales: integers from -128 to 127 times a float of their super-block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/copy.cuh"
#include "cuda/device/pair.cuh"

namespace jaxlowbit {

// A power of two, 2^(code - 127); 255 is NaN.
struct E8m0 {
  uint8_t code;
};

// An 8-bit float with 4 bits of exponent and 3 of mantissa, without infinities; its largest code is NaN.
struct E4m3 {
  uint8_t code;
};

// A byte of two-level scales: the integer of a group, or half of a super-block's float16 (docs/layout.md).
struct Super {
  uint8_t byte;
};

// Converts two E4m3s, in the low 16 bits, to a pair of f16, exactly.
__device__ inline uint32_t HalvesOfE4m3(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
#else
  const uint32_t spread = __byte_perm(codes, 0, 0x4140);  // bytes 0 and 2
  const uint32_t magnitudes = spread & 0x007f007f;
  // The exponent bias of e4m3 is 8 less than f16's. Only NaN's magnitude overflows into the bit above.
  const uint32_t scaled =
      Multiply<__half>(magnitudes << 7 | (spread & 0x00800080) << 8, PowersOfTwo<__half>(8));
  return scaled | ((magnitudes + 0x00010001) >> 7 & 0x00010001) * 0x7e00;
#endif
}

// Whether T represents every scale of type S exactly.
template <typename T, typename S>
inline constexpr bool kIsExact =
    std::is_same_v<S, T> || std::is_same_v<S, E4m3> || std::is_same_v<S, int8_t> ||
    (std::is_same_v<S, E8m0> && std::is_same_v<T, __nv_bfloat16>);

// Groups per atom of the microscaling formats, by scale type: group size 32 in MXFP4 and MXFP8, 16 in NVFP4; 0 for
// other scales.
template <typename S>
inline constexpr int kMicroGroupsOf = std::is_same_v<S, E8m0>   ? 2
                                      : std::is_same_v<S, E4m3> ? 4
                                                                : 0;

// Loads the raw scales of rows g and g + 8, which are adjacent in shared memory (layout.cuh).
template <typename S>
__device__ inline uint32_t LoadScalePair(uint32_t shared) {
  static_assert(sizeof(S) <= 2);
  return sizeof(S) == 2 ? LoadShared4(shared) : LoadShared2(shared);
}

__device__ inline float FloatOfE8m0(uint32_t code) {
  // Code 0 is subnormal in float32, and code 255 would become infinity.
  return __uint_as_float(code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23);
}

// Converts a pair of raw scales to floats.
template <typename S>
__device__ inline void FloatsOf(uint32_t both, float (&rows)[2]) {
  static_assert(sizeof(S) <= 2);
  if constexpr (std::is_same_v<S, E8m0>) {
    rows[0] = FloatOfE8m0(both & 255), rows[1] = FloatOfE8m0(both >> 8);
  } else if constexpr (std::is_same_v<S, E4m3>) {
    const uint32_t halves = HalvesOfE4m3(both);
    rows[0] = Pair<__half>::Low(halves), rows[1] = Pair<__half>::High(halves);
  } else if constexpr (std::is_same_v<S, int8_t>) {
    rows[0] = static_cast<float>(both & 255), rows[1] = static_cast<float>(both >> 8);
  } else {
    rows[0] = Pair<S>::Low(both), rows[1] = Pair<S>::High(both);
  }
}

// Loads scales of rows g and g + 8 as floats.
template <typename S>
__device__ inline void LoadFloats(uint32_t shared, float (&rows)[2]) {
  if constexpr (sizeof(S) == 4) {
    rows[0] = __uint_as_float(LoadShared4(shared));
    rows[1] = __uint_as_float(LoadShared4(shared + 4));
  } else {
    FloatsOf<S>(LoadScalePair<S>(shared), rows);
  }
}

// Loads the super-block floats of rows g and g + 8. A row of 64 low bytes precedes a row of 64 high bytes.
__device__ inline void LoadSuperFloats(uint32_t shared, float (&rows)[2]) {
  const uint32_t low = LoadShared2(shared), high = LoadShared2(shared + 64);
  const uint32_t halves = __byte_perm(low, high, 0x5140);
  rows[0] = Pair<__half>::Low(halves), rows[1] = Pair<__half>::High(halves);
}

// Loads a group's integers of rows g and g + 8 and multiplies them by super-block floats, exactly.
__device__ inline void LoadSuperScales(uint32_t shared, const float (&floats)[2],
                                       float (&rows)[2]) {
  // The mantissa of 2^23 counts in ones, so a byte in its lowest bits converts an integer to float.
  const uint32_t both = LoadShared2(shared) ^ 0x8080;
  constexpr float kMiddle = 8388608 + 128;
  rows[0] = (__uint_as_float(__byte_perm(both, 0x4b000000, 0x7440)) - kMiddle) * floats[0];
  rows[1] = (__uint_as_float(__byte_perm(both, 0x4b000000, 0x7441)) - kMiddle) * floats[1];
}

// Adds partial sums, in the order of operand D, times the scales of rows g and g + 8.
__device__ inline void AddScaledSums(const float (&part)[4], const float (&scale)[2],
                                     float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = fmaf(part[i], scale[i / 2], sums[i]);
}

// Converts a pair of raw scales to T, exactly.
template <typename T, typename S>
__device__ inline uint32_t ExactPair(uint32_t both) {
  static_assert(kIsExact<T, S>);
  if constexpr (std::is_same_v<S, T>) return both;
  if constexpr (std::is_same_v<S, E4m3> && std::is_same_v<T, __half>) return HalvesOfE4m3(both);
  float rows[2];
  FloatsOf<S>(both, rows);
  return Pair<T>::Round(rows[0], rows[1]);
}

// The scale, or the float zero, of one row. Computes in T if T represents it exactly, else in float32 with the result
// rounded to T; both round once. Without a float zero, -0 is added, which preserves even the sign of a zero.
template <typename T, typename S, bool kExact = kIsExact<T, S>>
struct RowScale {
  uint32_t value;  // in both halves
  static __device__ RowScale NegativeZero() { return {kNegativeZeros}; }
  // Loads rows g and g + 8.
  static __device__ void LoadPair(uint32_t shared, RowScale (&rows)[2]) {
    const uint32_t both = ExactPair<T, S>(LoadScalePair<S>(shared));
    rows[0].value = __byte_perm(both, both, 0x1010);
    rows[1].value = __byte_perm(both, both, 0x3232);
  }
  // Multiplies by 2^-kDown.
  template <int kDown>
  __device__ void Shrink() {
    constexpr float kFactor = 1.0f / (1 << kDown);
    value = Multiply<T>(value, Pair<T>::Round(kFactor, kFactor));
  }
  __device__ uint32_t MultiplyAdd(uint32_t integers, RowScale offset) const {
    return Pair<T>::Fma(integers, value, offset.value);
  }
};

template <typename T, typename S>
struct RowScale<T, S, false> {
  float value;
  static __device__ RowScale NegativeZero() { return {-0.0f}; }
  static __device__ void LoadPair(uint32_t shared, RowScale (&rows)[2]) {
    float values[2];
    LoadFloats<S>(shared, values);
    rows[0].value = values[0], rows[1].value = values[1];
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
