// SPDX-License-Identifier: Apache-2.0
//
// Dequantizes integers: the state of a lane for its two rows (g and g + 8) of an atom in one group.
#pragma once

#include <type_traits>

#include "cuda/device/dequant.cuh"
#include "cuda/device/format/scale.cuh"

namespace jaxlowbit {

// T: type of lhs, and so of the weights; S: type of the scales.
template <typename T, typename S, int kBits>
class RowPair {
 public:
  // Sets the default zeros, for groups without zeros.
  __device__ void Start(bool float_zeros) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // With float zeros, no zero point is subtracted.
      zero_point_[h] = ZeroPoint<T, kBits>::Of(float_zeros ? 0 : 1 << (kBits - 1));
      offset_[h] = RowScale<T, S>::NegativeZero();
    }
  }

  // Addresses, here and below, point to row g in shared memory.
  __device__ void LoadScales(uint32_t scale) { RowScale<T, S>::LoadPair(scale, scale_); }
  __device__ void LoadFloatZeros(uint32_t zero) { RowScale<T, S>::LoadPair(zero, offset_); }
  __device__ void LoadIntegerZeros(uint32_t zero) {
    const uint32_t both = LoadShared2(zero);
    zero_point_[0] = ZeroPoint<T, kBits>::Of(both & 255);
    zero_point_[1] = ZeroPoint<T, kBits>::Of(both >> 8);
  }

  // The scale of row g + 8 * h.
  __device__ S scale(int h) const { return scale_[h].value; }

  // The weights of one step, in the order of operand A; unscaled if scales multiply accumulators.
  template <bool kWithScale = true>
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    Unpack<T, kBits>(packed, step, zero_point_, weights);
    if constexpr (kWithScale) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[j] = scale_[j % 2].MultiplyAdd(weights[j], offset_[j % 2]);
      }
    }
  }

 private:
  RowScale<T, S> scale_[2], offset_[2];
  ZeroPoint<T, kBits> zero_point_[2];
};

// Loads the zero points of rows g and g + 8, which are adjacent, from row g's address in shared memory.
template <class C>
__device__ inline void LoadZeroPoints(uint32_t zero, C (&zero_point)[2]) {
  const uint32_t both = LoadShared2(zero);
  zero_point[0] = C::Of(__byte_perm(both, 0, 0x4040));
  zero_point[1] = C::Of(__byte_perm(both, 0, 0x4141));
}

// Computes weights times 2^-kWeightShift<T>, in fewer instructions than RowPair.
template <typename T, typename S, int kBits>
class ScaledRowPair {
 public:
  __device__ void Start(bool float_zeros) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // With float zeros, no zero point is subtracted.
      zero_point_[h] = float_zeros ? ZeroPoint::Of(0) : ZeroPoint::OfPowerOfTwo(kBits - 1);
      offset_[h] = RowScale<T, S>::NegativeZero();
    }
  }

  __device__ void LoadScales(uint32_t scale) { RowScale<T, S>::LoadPair(scale, scale_); }
  __device__ void LoadFloatZeros(uint32_t zero) {
    RowScale<T, S>::LoadPair(zero, offset_);
#pragma unroll
    for (int h = 0; h < 2; ++h) offset_[h].template Shrink<kDown>();
  }
  __device__ void LoadIntegerZeros(uint32_t zero) { LoadZeroPoints(zero, zero_point_); }

  // The weights of one step, in the order of operand A.
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    UnpackIntegers<T, kBits, kDown>(packed, step, zero_point_, weights);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      weights[j] = scale_[j % 2].MultiplyAdd(weights[j], offset_[j % 2]);
    }
  }

 private:
  static constexpr int kDown = kWeightShift<T>;
  using ZeroPoint = IntegerZeroPoint<T, kDown, kSecondUp<kBits>>;

  RowScale<T, S> scale_[2], offset_[2];
  ZeroPoint zero_point_[2];
};

// Whether FusedRowPair supports a type of lhs and a width.
template <typename T, int kBits>
inline constexpr bool kCanFuse = std::is_same_v<T, __nv_bfloat16> || kBits <= 4;

// Bit-identical to ScaledRowPair, with one fma per pair of weights on quantized values in place. Requires float zeros
// or none, and scales of type T that pass SupportsScales(): they are multiplied by the power of two from a subnormal's
// unit to 2^-kWeightShift, so they must be small. Without zeros, the offset 2^(kBits - 1) * scale is exact.
template <typename T, int kBits>
class FusedRowPair {
 public:
  // Accumulates pairs of scales for SupportsAllScales().
  static __device__ uint32_t Join(uint32_t a, uint32_t b) {
    return kHalf ? __vmaxu2(a & 0x7fff7fff, b & 0x7fff7fff) : a | b;
  }
  // Whether all scales are below 2, or in f16 below 2^(kLifted - 8), so that the factors are below 2^16.
  static __device__ bool SupportsScales(uint32_t scales) {
    if constexpr (kHalf) {
      constexpr uint32_t kLimit = PowerOfTwo<T>(kLifted<kBits> - 8);
      return (scales & 0xffff) < kLimit && scales >> 16 < kLimit;
    }
    return (scales & PowersOfTwo<T>(1)) == 0;
  }
  static __device__ bool SupportsAllScales(uint32_t joined) { return SupportsScales(joined); }

  __device__ void Start(bool float_zeros) { float_zeros_ = float_zeros; }

  __device__ void LoadScales(uint32_t scale) {
    const uint32_t both = LoadShared4(scale);
    constexpr int kUp = -kSubnormalUnit<T> - kDown - (kHalf ? kLifted<kBits> : 0);
    // f16 has no larger power of two than 2^15.
    constexpr int kFirst = kHalf ? 15 : kUp;
    uint32_t up =
        Multiply<T>(both, PowerOfTwo<T>(kFirst) | PowerOfTwo<T>(kFirst - kSecondUp<kBits>) << 16);
    if (kHalf) up = Multiply<T>(up, PowersOfTwo<T>(kUp - kFirst));
    Duplicate(up, scale_);
    if (!float_zeros_) {
      Duplicate(Multiply<T>(both, PowersOfTwo<T>(kBits - 1 - kDown) | kNegativeZeros), offset_);
    }
  }
  __device__ void LoadFloatZeros(uint32_t zero) {
    Duplicate(Multiply<T>(LoadShared4(zero), PowersOfTwo<T>(-kDown)), offset_);
  }

  // The weights of one step, in the order of operand A.
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    if constexpr (kHalf) {
      LiftValues<kBits>(packed, step, weights);
    } else {
      SeparateValues<kBits>(packed, step, weights);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      weights[j] = Pair<T>::Fma(weights[j], scale_[j % 2], offset_[j % 2]);
  }

 private:
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr int kDown = kWeightShift<T>;

  bool float_zeros_;
  uint32_t scale_[2], offset_[2];
};

// Channel scales (a single group) multiply accumulators. Weights are integers times the scale's power of two, which is
// exact and keeps accumulators in the range of scaled weights. The caller multiplies accumulators by 2^kWeightShift, as
// for scaled weights, then by the rest of the scale, Factor().
template <typename T, typename S, int kBits>
class ChannelRowPair {
 public:
  // Addresses point to row g in shared memory. Load scales before zeros.
  __device__ void LoadScales(uint32_t scale) {
    float scales[2];
    LoadFloats<S>(scale, scales);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int exponent = Exponent(scales[h]);
      factor_[h] = scales[h] * __uint_as_float(PowerOfTwoFloat(kDown - kWeightShift<T> - exponent));
      unit_[h] = PowersOfTwo<T>(exponent - kDown - kSubnormalUnit<T>);
      up_[h] = unit_[h] - (h == 0 ? 0 : kSecondUp<kBits> << Pair<T>::kMantissaBits) * 0x00010001u;
      offset_[h] = PowersOfTwo<T>(kBits - 1 + exponent - kDown) | kNegativeZeros;
    }
  }
  __device__ void LoadIntegerZeros(uint32_t zero) {
    const uint32_t both = LoadShared2(zero);
    offset_[0] = Multiply<T>(__byte_perm(both, 0, 0x4040), unit_[0] | kNegativeZeros);
    offset_[1] = Multiply<T>(__byte_perm(both, 0, 0x4141), unit_[1] | kNegativeZeros);
  }

  // The factor of the accumulators of row g + 8 * h.
  __device__ float Factor(int h) const { return factor_[h]; }

  // The weights of one step, in the order of operand A.
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    SeparateValues<kBits>(packed, step, weights);
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[j] = Pair<T>::Fma(weights[j], up_[j % 2], offset_[j % 2]);
  }

 private:
  // In f16, weights are integers times 2^-9 for any scale: float32 accumulators have range to spare.
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr int kDown = kHalf ? kShift<T> : kWeightShift<T>;

  // The exponent of the power of two in the weights: at most 0, so that quantized values can be read as subnormals; at
  // least -120, so that no bits are lost.
  static __device__ int Exponent(float scale) {
    const int exponent = static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127;
    return kHalf ? 0 : max(-120, min(0, exponent));
  }

  float factor_[2];
  uint32_t unit_[2], up_[2], offset_[2];
};

// Scales multiply accumulators: weights are integers, and the partial sum of a group is scaled in float32. Weights are
// exact for every scale, so results are at least as accurate as with rounded weights.
template <typename T, typename S, int kBits>
class IntegerRowPair {
 public:
  __device__ void Start(bool) {
    zero_point_[0] = zero_point_[1] = ZeroPoint::OfPowerOfTwo(kBits - 1);
  }

  __device__ void LoadScales(uint32_t scale) { LoadFloats<S>(scale, scale_); }
  __device__ void LoadIntegerZeros(uint32_t zero) { LoadZeroPoints(zero, zero_point_); }

  // The weights of one step without their scales, in the order of operand A.
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    UnpackIntegers<T, kBits, kDown>(packed, step, zero_point_, weights);
  }

  // Adds the scaled partial sums of one group, in the order of operand D.
  __device__ void AddScaled(const float (&part)[4], float (&sums)[4]) const {
    AddScaledSums(part, scale_, sums);
  }

 protected:
  static constexpr int kDown = kShift<T>;
  using ZeroPoint = IntegerZeroPoint<T, kDown, kSecondUp<kBits>>;

  float scale_[2];
  ZeroPoint zero_point_[2];
};

// IntegerRowPair for two-level scales. Float zeros multiply the sum of lhs over their group, so weights need no scale.
// Integers stay centred around 0, which keeps both sums small; zeros include the offset times the scale.
template <typename T, int kBits>
class SuperRowPair : public IntegerRowPair<T, Super, kBits> {
  using Base = IntegerRowPair<T, Super, kBits>;

 public:
  // Operand A of a product that sums lhs; scaled by 2^-kDown like the integers.
  static constexpr uint32_t kOnes = PowersOfTwo<T>(-Base::kDown);

  // Loads the floats of a super-block; call before loading its groups. Addresses point to row g in shared memory.
  __device__ void LoadScaleFloats(uint32_t floats) { LoadSuperFloats(floats, scale_floats_); }
  __device__ void LoadZeroFloats(uint32_t floats) { LoadSuperFloats(floats, zero_floats_); }

  __device__ void LoadScales(uint32_t scale) {
    LoadSuperScales(scale, scale_floats_, this->scale_);
  }
  // Call after LoadScales.
  __device__ void LoadFloatZeros(uint32_t zero) {
    LoadSuperScales(zero, zero_floats_, zero_);
#pragma unroll
    for (int h = 0; h < 2; ++h) zero_[h] = fmaf(this->scale_[h], 1 << (kBits - 1), zero_[h]);
  }

  // Adds the zeros times the sums of lhs over the group, in the order of operand D.
  __device__ void AddZeros(const float (&lhs_sums)[4], float (&sums)[4]) const {
    AddScaledSums(lhs_sums, zero_, sums);
  }

  // AddScaled and AddZeros for only one of a lane's two columns, in the group whose scales are loaded.
  template <bool kZeros>
  __device__ void AddColumn(int column, const float (&part)[4], const float (&lhs_sums)[4],
                            float (&sums)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float& sum = sums[2 * h + column];
      sum = fmaf(part[2 * h + column], this->scale_[h], sum);
      if constexpr (kZeros) sum = fmaf(lhs_sums[2 * h + column], zero_[h], sum);
    }
  }

 private:
  float scale_floats_[2], zero_floats_[2], zero_[2];
};

}  // namespace jaxlowbit
