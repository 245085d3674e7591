// SPDX-License-Identifier: Apache-2.0
//
// What a lane needs to dequantize its two rows of an atom, g and g + 8, in one group, where quantized values stand for
// the numbers of a codebook: the twins of rows.cuh. Weights come out times 2^-kDown, or accumulators do.
#pragma once

#include <type_traits>

#include "cuda/device/dequant.cuh"
#include "cuda/device/format/codebook.cuh"
#include "cuda/device/format/scale.cuh"

namespace jaxlowbit {

// The power of two by which Hopper's kernels make weights, or the sums of unscaled ones, smaller. In bf16 it keeps the
// sum of an atom's products from overflowing at the top of bf16's range, and leaves room for large scales beside the
// power of two that e2m1 needs: any e4m3, and e8m0 below 2^5. With more of it weights of the least e8m0 would lose bits.
template <typename T, typename S, Codebook kCodebook>
inline constexpr int kCodebookShift = !std::is_same_v<T, __nv_bfloat16> ? 0
                                      : !std::is_same_v<S, E8m0>        ? 7
                                      : kCodebook == Codebook::kE2m1    ? 5
                                                                        : 0;

// The power of two by which products with scaled weights are smaller, of integers or of a codebook.
template <typename T, typename S, Codebook kCodebook>
inline constexpr int kProductShift = kCodebookShift<T, S, kCodebook>;
template <typename T, typename S>
inline constexpr int kProductShift<T, S, Codebook::kNone> = kWeightShift<T>;

// Multiplies each of the registers of a step by that of its row.
template <typename T>
__device__ inline void MultiplyRows(const uint32_t (&factor)[2], uint32_t (&weights)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) weights[j] = Multiply<T>(weights[j], factor[j % 2]);
}

// Rows of a table, whose numbers are floats of 32 bits: the product with a scale is rounded once.
template <typename T, typename S, int kBits, int kDown>
class TableRowPair {
 public:
  __device__ void Start(bool) {}
  __device__ void Use(const Table<Codebook::kTable>& table) { own_ = table.own; }

  // Addresses, here and below, are those of row g in shared memory.
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
  // `code`: a quantized value. Bits above those of a lane's number may be anything.
  __device__ float Find(uint32_t code) const {
    return __shfl_sync(~0u, own_, static_cast<int>(code));
  }

  float own_;  // the number in this lane
  float scale_[2];
};

// Rows of floats, whose numbers a power of two brings to their size before any scale multiplies them.
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

// The largest scales that are Ts, and stay so beside the power of two that numbers need: any e4m3, whose largest is
// below 2^9; all that numbers need no power of two for; otherwise those that Takes() allows in bf16.
template <typename T, typename S, Codebook kCodebook, int kDown>
struct Fusing {
  static constexpr int kUp = Numbers<T, kCodebook>::kRaised - kDown;
  static constexpr bool kTakesAll =
      kIsExact<T, S> && (kUp <= 0 || (std::is_same_v<S, E4m3> && kUp + 8 <= Pair<T>::kBias));
  static constexpr bool kTakesSome =
      kTakesAll || (kIsExact<T, S> && sizeof(S) <= 2 && kUp < Pair<T>::kBias);
};

template <typename T, typename S, int kDown>
struct Fusing<T, S, Codebook::kTable, kDown> {
  static constexpr bool kTakesAll = false, kTakesSome = false;
};

// Rows whose weights are those of NumberRowPair, by one multiplication, for scales that Takes() allows.
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
class FusedNumberRowPair {
 public:
  // Joins scales, as they are in memory, to what TakesAll() needs to know of them, which is 0 at first.
  static __device__ uint32_t Join(uint32_t joined, uint32_t scales) {
    if constexpr (std::is_same_v<S, E8m0>) {
      // A code of 128 + 4 and more has the upper bit and one of the five below it.
      static_assert(kUp + 5 <= Pair<T>::kBias);
      return joined | (scales & ((scales & 0x7c7c7c7c) + 0x7c7c7c7c));
    } else {
      return joined | scales;
    }
  }
  // Whether all scales are below 2; powers of two in 8 bits, below 2^5.
  static __device__ bool TakesAll(uint32_t joined) {
    // The upper bit of the exponent says so in each of these types.
    return (joined & (std::is_same_v<S, E8m0>   ? 0x80808080
                      : std::is_same_v<S, E4m3> ? 0x40404040
                                                : PowersOfTwo<T>(1))) == 0;
  }
  static __device__ bool Takes(uint32_t scales) { return TakesAll(Join(0, scales)); }
  // What numbers are multiplied by, as a pair, from a pair of scales as they are in memory.
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

// FusedNumberRowPairs of kGroups groups that follow each other: of the four lanes that share these rows each loads and
// converts the scales of every fourth group, and passes their factors on.
template <class Fused, typename S, int kGroups>
class GroupedRowPair : public Fused {
 public:
  // `scale`: the address of that of row g in the first group.
  __device__ void LoadGroups(uint32_t scale) {
    const int lane = threadIdx.x % kLanes % kGroups;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = (i * kLanes + lane) * kStrip;
      factors_[i] = Fused::FactorsOf(LoadScalePair<S>(scale + row * sizeof(S)));
    }
  }
  // Makes these the rows of a group.
  __device__ void UseGroup(int group) {
    Fused::Use(__shfl_sync(~0u, factors_[group / kLanes], group % kLanes, kLanes));
  }

 private:
  static constexpr int kStrip = 64;  // channels, whose scales of a group follow each other
  static constexpr int kLanes = 4, kOwn = (kGroups + kLanes - 1) / kLanes;

  uint32_t factors_[kOwn];
};

// Rows whose scales multiply accumulators, for numbers that are Ts: the partial sum of a group is scaled in float32.
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

// Rows of a single group, whose scales multiply accumulators: weights are numbers times the power of two in their
// scale, as far as that loses nothing, which keeps accumulators in the range of scaled weights. Accumulators are to be
// multiplied by 2^kDown, then by the rest of the scale, Factor().
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
  // The exponent of that power of two: none in f16, where accumulators have range to spare; in bf16 e5m2's numbers lose
  // no bits from -100 on.
  static __device__ int Exponent(float scale) {
    const int exponent = static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127;
    return std::is_same_v<T, __half> ? 0 : max(-100, min(0, exponent));
  }

  float factor_[2];
  uint32_t unit_[2];
};

// The rows of a group that take any scale.
template <typename T, typename S, int kBits, Codebook kCodebook, int kDown>
struct CodebookRows {
  using type =
      std::conditional_t<kCodebook == Codebook::kTable, TableRowPair<T, S, kBits, kDown>,
                         std::conditional_t<Fusing<T, S, kCodebook, kDown>::kTakesAll,
                                            FusedNumberRowPair<T, S, kBits, kCodebook, kDown>,
                                            NumberRowPair<T, S, kBits, kCodebook, kDown>>>;
};

// Starts the rows of a group, which use `table` if they are those of a table.
template <class Rows, Codebook kCodebook>
__device__ inline void StartRows(bool float_zeros, const Table<kCodebook>& table, Rows& rows) {
  rows.Start(float_zeros);
  if constexpr (kCodebook == Codebook::kTable) rows.Use(table);
}

}  // namespace jaxlowbit
