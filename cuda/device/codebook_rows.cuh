// SPDX-License-Identifier: Apache-2.0
//
// Dequantizes codebook formats: the state of a lane for its two rows (g and g + 8) of an atom in one group. rows.cuh is
// the same for integers. Weights, or accumulators if scales multiply those, include the factor 2^-kDown.
#pragma once

#include <type_traits>

#include "cuda/device/dequant.cuh"
#include "cuda/device/format/codebook.cuh"
#include "cuda/device/format/scale.cuh"

namespace jaxlowbit {

// Hopper's kernels scale weights, or accumulators of unscaled weights, by 2^-kCodebookShift. In bf16 this keeps the sum
// of an atom's products from overflowing at the top of bf16's range, and lets e2m1's power of two be combined with
// large scales: any e4m3, and e8m0 below 2^5. A larger shift would lose bits of weights with the smallest e8m0.
template <typename T, typename S, Codebook kCodebook>
inline constexpr int kCodebookShift = !std::is_same_v<T, __nv_bfloat16> ? 0
                                      : !std::is_same_v<S, E8m0>        ? 7
                                      : kCodebook == Codebook::kE2m1    ? 5
                                                                        : 0;

// Accumulators of products with scaled weights, integer or codebook, include the factor 2^-kProductShift.
template <typename T, typename S, Codebook kCodebook>
inline constexpr int kProductShift = kCodebookShift<T, S, kCodebook>;
template <typename T, typename S>
inline constexpr int kProductShift<T, S, Codebook::kNone> = kWeightShift<T>;

// Multiplies each register of a step by its row's factor.
template <typename T>
__device__ inline void MultiplyRows(const uint32_t (&factor)[2], uint32_t (&weights)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) weights[j] = Multiply<T>(weights[j], factor[j % 2]);
}

// Table codebooks: a weight is a float32 entry times the scale, rounded once to T.
template <typename T, typename S, int kBits, int kDown>
class TableRowPair {
 public:
  __device__ void Start(bool) {}
  __device__ void Use(const Table<Codebook::kTable>& table) { own_ = table.own; }

  // Addresses, here and below, point to row g in shared memory.
  __device__ void LoadScales(uint32_t scale) {
    LoadFloats<S>(scale, scale_);
#pragma unroll
    for (float& own : scale_) own *= 1.0f / (1 << kDown);
  }

  // The weights of one step, in the order of operand A.
  template <bool kWithScale = true>
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    using F = Integer<kBits>;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int shift = F::Shift(step, j / 2) + j % 2 * F::kUp;
      const uint32_t word = F::Word(packed, step, j / 2);
      const float low = Find(word >> shift), high = Find(word >> (shift + 16));
      weights[j] = Pair<T>::Round(low * scale_[j % 2], high * scale_[j % 2]);
    }
  }

 private:
  // Returns the entry of `code`. The shuffle ignores bits above the lane number.
  __device__ float Find(uint32_t code) const {
    return __shfl_sync(~0u, own_, static_cast<int>(code));
  }

  float own_;  // the entry in this lane
  float scale_[2];
};

// Float codebooks with any scale: entries are multiplied by a power of two first, then by the scale.
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
class NumberRowPair {
 public:
  __device__ void Start(bool) {}
  __device__ void LoadScales(uint32_t scale) { RowScale<T, S>::LoadPair(scale, scale_); }

  template <bool kWithScale = true>
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    Numbers<T, kCodebook>::Read(packed, step, weights);
    if constexpr (kUp != 0) MultiplyRows<T>({PowersOfTwo<T>(kUp), PowersOfTwo<T>(kUp)}, weights);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      weights[j] = scale_[j % 2].MultiplyAdd(weights[j], RowScale<T, S>::NegativeZero());
    }
  }

 private:
  static constexpr int kUp = Numbers<T, kCodebook>::kRaised - kDown;

  RowScale<T, S> scale_[2];
};

// Whether scales stay exact in T after multiplication by 2^kUp, the power of two that decoded entries lack.
// kSupportsAll: for all scales, because kUp <= 0 or because e4m3 scales are below 2^9. kSupportsSome: at least for
// scales that pass SupportsAllScales().
template <typename T, typename S, Codebook kCodebook, int kDown>
struct Fusing {
  static constexpr int kUp = Numbers<T, kCodebook>::kRaised - kDown;
  static constexpr bool kSupportsAll =
      kIsExact<T, S> && (kUp <= 0 || (std::is_same_v<S, E4m3> && kUp + 8 <= Pair<T>::kBias));
  static constexpr bool kSupportsSome =
      kSupportsAll || (kIsExact<T, S> && sizeof(S) <= 2 && kUp < Pair<T>::kBias);
};

template <typename T, typename S, int kDown>
struct Fusing<T, S, Codebook::kTable, kDown> {
  static constexpr bool kSupportsAll = false, kSupportsSome = false;
};

// Computes the weights of NumberRowPair with one multiplication, for scales that pass SupportsScales().
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
class FusedNumberRowPair {
 public:
  // Accumulates raw scales for SupportsAllScales(); initial value 0.
  static __device__ uint32_t Join(uint32_t joined, uint32_t scales) {
    if constexpr (std::is_same_v<S, E8m0>) {
      // Codes of 128 + 4 and above have the upper bit and one of the next five set.
      static_assert(kUp + 5 <= Pair<T>::kBias);
      return joined | (scales & ((scales & 0x7c7c7c7c) + 0x7c7c7c7c));
    } else {
      return joined | scales;
    }
  }
  // Whether all scales are below 2, or below 2^5 for e8m0.
  static __device__ bool SupportsAllScales(uint32_t joined) {
    // Tests the upper exponent bit of each type.
    return (joined & (std::is_same_v<S, E8m0>   ? 0x80808080
                      : std::is_same_v<S, E4m3> ? 0x40404040
                                                : PowersOfTwo<T>(1))) == 0;
  }
  static __device__ bool SupportsScales(uint32_t scales) {
    return SupportsAllScales(Join(0, scales));
  }
  // Converts a pair of raw scales to a pair of factors for the numbers.
  static __device__ uint32_t FactorsOf(uint32_t scales) {
    if constexpr (std::is_same_v<S, E8m0> && kUp > 0) {
      return (__byte_perm(scales, 0, 0x4140) + kUp * 0x00010001u) << Pair<T>::kMantissaBits;
    } else {
      const uint32_t both = ExactPair<T, S>(scales);
      return kUp == 0 ? both : Multiply<T>(both, PowersOfTwo<T>(kUp));
    }
  }

  __device__ void Start(bool) {}
  __device__ void Use(uint32_t factors) { RepeatHalves(factors, factor_); }
  __device__ void LoadScales(uint32_t scale) { Use(FactorsOf(LoadScalePair<S>(scale))); }

  template <bool kWithScale = true>
  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    Numbers<T, kCodebook>::Read(packed, step, weights);
    MultiplyRows<T>(factor_, weights);
  }

 private:
  static constexpr int kUp = Fusing<T, S, kCodebook, kDown>::kUp;

  uint32_t factor_[2];
};

// FusedNumberRowPairs of kGroups consecutive groups. Each of the four lanes of a row loads and converts the scales of
// every fourth group; lanes exchange the factors by shuffles.
template <class Fused, typename S, int kGroups>
class GroupedRowPair : public Fused {
 public:
  // `scale`: the address of row g's scale in the first group.
  __device__ void LoadGroups(uint32_t scale) {
    const int lane = threadIdx.x % kLanes % kGroups;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = (i * kLanes + lane) * kStrip;
      factors_[i] = Fused::FactorsOf(LoadScalePair<S>(scale + row * sizeof(S)));
    }
  }
  // Sets the rows to a group.
  __device__ void UseGroup(int group) {
    Fused::Use(__shfl_sync(~0u, factors_[group / kLanes], group % kLanes, kLanes));
  }

 private:
  static constexpr int kStrip = 64;  // channels with consecutive scales in a group
  static constexpr int kLanes = 4, kOwn = (kGroups + kLanes - 1) / kLanes;

  uint32_t factors_[kOwn];
};

// Weights are unscaled entries, exact in T; the scale multiplies the partial sum of its group in float32.
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
class NumberSumsRowPair {
 public:
  __device__ void Start(bool) {}
  __device__ void LoadScales(uint32_t scale) { LoadFloats<S>(scale, scale_); }

  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    constexpr int kUp = Numbers<T, kCodebook>::kRaised - kDown;
    Numbers<T, kCodebook>::Read(packed, step, weights);
    if constexpr (kUp != 0) MultiplyRows<T>({PowersOfTwo<T>(kUp), PowersOfTwo<T>(kUp)}, weights);
  }

  // Adds the scaled partial sums of one group, in the order of operand D.
  __device__ void AddScaled(const float (&part)[4], float (&sums)[4]) const {
    AddScaledSums(part, scale_, sums);
  }

 private:
  float scale_[2];
};

// Channel scales (a single group) multiply accumulators. Weights are entries times the scale's power of two, limited to
// stay exact, which keeps accumulators in the range of scaled weights. The caller multiplies accumulators by 2^kDown,
// then by the rest of the scale, Factor().
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
class NumberChannelRowPair {
 public:
  __device__ void LoadScales(uint32_t scale) {
    float scales[2];
    LoadFloats<S>(scale, scales);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int exponent = Exponent(scales[h]);
      factor_[h] = scales[h] * __uint_as_float(PowerOfTwoFloat(-exponent));
      unit_[h] = PowersOfTwo<T>(Numbers<T, kCodebook>::kRaised - kDown + exponent);
    }
  }

  // The factor of the accumulators of row g + 8 * h.
  __device__ float Factor(int h) const { return factor_[h]; }

  __device__ void Dequantize(const uint32_t (&packed)[kBits], int step,
                             uint32_t (&weights)[4]) const {
    Numbers<T, kCodebook>::Read(packed, step, weights);
    MultiplyRows<T>(unit_, weights);
  }

 private:
  // The exponent of the power of two in the weights: 0 in f16, since float32 accumulators have range to spare; at least
  // -100 in bf16, so that e5m2 loses no bits.
  static __device__ int Exponent(float scale) {
    const int exponent = static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127;
    return std::is_same_v<T, __half> ? 0 : max(-100, min(0, exponent));
  }

  float factor_[2];
  uint32_t unit_[2];
};

// The row type that supports any scale.
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
struct CodebookRows {
  using type =
      std::conditional_t<kCodebook == Codebook::kTable, TableRowPair<T, S, kBits, kDown>,
                         std::conditional_t<Fusing<T, S, kCodebook, kDown>::kSupportsAll,
                                            FusedNumberRowPair<T, S, kBits, kCodebook, kDown>,
                                            NumberRowPair<T, S, kBits, kCodebook, kDown>>>;
};

// Starts the rows of a group; table codebooks use `table`.
template <class Rows, Codebook kCodebook>
__device__ inline void StartRows(bool float_zeros, const Table<kCodebook>& table, Rows& rows) {
  rows.Start(float_zeros);
  if constexpr (kCodebook == Codebook::kTable) rows.Use(table);
}

}  // namespace jaxlowbit
