// SPDX-License-Identifier: Apache-2.0
//
// A row of a head, distributed over a warp: bias, RMSNorm and rotation (attend.h).
#pragma once

namespace jaxlowbit {

// Columns of a lane's pairs of elements: pairs lane, lane + 32, ...
template <int kSize>
struct Pairs {
  static constexpr int kCount = kSize / 64;
  int half;  // half of the head size
  bool neighbours;

  __device__ int Number(int i) const { return 32 * i + static_cast<int>(threadIdx.x) % 32; }
  __device__ bool Has(int i) const { return Number(i) < half; }
  __device__ int First(int i) const { return neighbours ? 2 * Number(i) : Number(i); }
  __device__ int Second(int i) const { return neighbours ? 2 * Number(i) + 1 : Number(i) + half; }
};

template <int kSize>
struct Angles {
  float cos[Pairs<kSize>::kCount], sin[Pairs<kSize>::kCount];

  __device__ Angles(const Pairs<kSize>& pairs, const float* all_cos, const float* all_sin) {
#pragma unroll
    for (int i = 0; i < pairs.kCount; ++i) {
      const int number = pairs.Has(i) ? pairs.Number(i) : 0;
      cos[i] = all_cos[number];
      sin[i] = all_sin[number];
    }
  }
};

// Loads everything first, without branches between loads, so that a warp waits for memory once.
template <typename T, int kSize>
class HeadRow {
 public:
  // `bias`, `norm`: null for none.
  __device__ HeadRow(const Pairs<kSize>& pairs, const T* row, const float* bias, const float* norm)
      : pairs_(pairs), has_bias_(bias != nullptr), normalizes_(norm != nullptr) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      loaded_a_[i] = row[pairs.Has(i) ? pairs.First(i) : 0];
      loaded_b_[i] = row[pairs.Has(i) ? pairs.Second(i) : 0];
    }
    if (has_bias_) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        bias_a_[i] = bias[pairs.Has(i) ? pairs.First(i) : 0];
        bias_b_[i] = bias[pairs.Has(i) ? pairs.Second(i) : 0];
      }
    }
    if (!normalizes_) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      norm_a_[i] = norm[pairs.Has(i) ? pairs.First(i) : 0];
      norm_b_[i] = norm[pairs.Has(i) ? pairs.Second(i) : 0];
    }
  }

  // Converts the loaded elements to float32, which waits for memory, and adds the bias. Call before the methods below.
  __device__ void Widen() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      a_[i] = pairs_.Has(i) ? static_cast<float>(loaded_a_[i]) : 0;
      b_[i] = pairs_.Has(i) ? static_cast<float>(loaded_b_[i]) : 0;
    }
    if (!has_bias_) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!pairs_.Has(i)) continue;
      a_[i] = Rounded(a_[i] + Rounded(bias_a_[i]));
      b_[i] = Rounded(b_[i] + Rounded(bias_b_[i]));
    }
  }

  __device__ void Normalize(float epsilon) {
    if (!normalizes_) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < pairs_.kCount; ++i) sum += a_[i] * a_[i] + b_[i] * b_[i];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const float factor = rsqrtf(sum / static_cast<float>(2 * pairs_.half) + epsilon);
#pragma unroll
    for (int i = 0; i < pairs_.kCount; ++i) {
      a_[i] = Rounded(a_[i] * factor * norm_a_[i]);
      b_[i] = Rounded(b_[i] * factor * norm_b_[i]);
    }
  }

  __device__ void Rotate(const Angles<kSize>& angles) {
#pragma unroll
    for (int i = 0; i < pairs_.kCount; ++i) {
      const float a = a_[i];
      a_[i] = a * angles.cos[i] - b_[i] * angles.sin[i];
      b_[i] = b_[i] * angles.cos[i] + a * angles.sin[i];
    }
  }

  // Calls store(column, value) for every element of this lane.
  template <typename Store>
  __device__ void ForEach(const Store& store) const {
#pragma unroll
    for (int i = 0; i < pairs_.kCount; ++i) {
      if (!pairs_.Has(i)) continue;
      store(pairs_.First(i), T(a_[i]));
      store(pairs_.Second(i), T(b_[i]));
    }
  }

 private:
  static constexpr int kPairs = Pairs<kSize>::kCount;

  static __device__ float Rounded(float value) { return static_cast<float>(T(value)); }

  Pairs<kSize> pairs_;
  bool has_bias_, normalizes_;
  T loaded_a_[kPairs], loaded_b_[kPairs];
  float a_[kPairs], b_[kPairs], bias_a_[kPairs], bias_b_[kPairs], norm_a_[kPairs], norm_b_[kPairs];
};

}  // namespace jaxlowbit
