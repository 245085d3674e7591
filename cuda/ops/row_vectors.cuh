// SPDX-License-Identifier: Apache-2.0
//
// Vectors of a row that is added to and normalized (rms_norm.h), for the kernels that do so.
#pragma once

#include <cstdint>

#include "cuda/device/row_squares.cuh"
#include "cuda/ops/rounded_row.cuh"

namespace jaxlowbit::row {

inline constexpr int kElements = kSquaresElements;  // per vector

template <typename T>
struct alignas(16) Vector {
  T at[kElements];
};

template <bool kAligned, typename T>
__device__ Vector<T> Load(const T* pointer, int64_t vector) {
  if constexpr (kAligned) {
    return reinterpret_cast<const Vector<T>*>(pointer)[vector];
  } else {
    Vector<T> value;
#pragma unroll
    for (int i = 0; i < kElements; ++i) value.at[i] = pointer[vector * kElements + i];
    return value;
  }
}
template <bool kAligned, typename T>
__device__ void Store(const Vector<T>& value, T* pointer, int64_t vector) {
  if constexpr (kAligned) {
    reinterpret_cast<Vector<T>*>(pointer)[vector] = value;
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) pointer[vector * kElements + i] = value.at[i];
  }
}

// Loads a vector of float32 if `wide`, else of T.
template <bool kAligned, typename T>
__device__ Vector<float> LoadFloats(const void* from, bool wide, int64_t vector) {
  if (wide) return Load<kAligned>(static_cast<const float*>(from), vector);
  const Vector<T> narrow = Load<kAligned>(static_cast<const T*>(from), vector);
  Vector<float> value;
#pragma unroll
  for (int i = 0; i < kElements; ++i) value.at[i] = static_cast<float>(narrow.at[i]);
  return value;
}

// The sum of `value` over all threads of the CTA.
__device__ inline float SumOfBlock(float value) {
  __shared__ float sums[kMaxThreads / 32];
  value = SumOfLanes(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  return SumOfLanes(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0);
}

// Adds an addend, rounded, to a vector, and the squares of the rounded sums to `squares`.
template <typename T>
__device__ void AddTo(const Vector<float>& addend, Vector<T>& sum, float& squares) {
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    sum.at[j] = T(static_cast<float>(sum.at[j]) + static_cast<float>(T(addend.at[j])));
    squares += static_cast<float>(sum.at[j]) * static_cast<float>(sum.at[j]);
  }
}

// An element of the normalized row. `factor`: 1 / sqrt(mean of the squares + epsilon).
template <typename T>
__device__ T Scaled(T sum, float factor, float scale) {
  return T(static_cast<float>(sum) * factor * scale);
}

}  // namespace jaxlowbit::row
