// SPDX-License-Identifier: Apache-2.0
//
// From sums to results, for every kernel: the epilogue of a problem (problem.h) in float32.
//
// A kernel takes few of a thread's sums at a time, in a loop that is not unrolled, so that the formulas
// are in its code once; sums that are in registers go through shared memory for that.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// The epilogue as a kernel reads it.
struct EpilogueParams {
  const void* bias;                 // [batch * weights_per_element, n]; null: none
  const void* residual;             // [batch, m, n]; null: none
  bool bias_float, residual_float;  // float32; else the type of lhs
  Activation activation;
  bool gated;
  bool any;  // else results are the sums
};

inline EpilogueParams EpilogueOf(const QuantizedMatmul& problem, const Buffers& buffers) {
  const Epilogue& e = problem.epilogue;
  const bool any = e.gated || e.activation != Activation::kNone || buffers.bias != nullptr ||
                   buffers.residual != nullptr;
  return {buffers.bias,
          buffers.residual,
          e.bias == ElementType::kF32,
          e.residual == ElementType::kF32,
          e.activation,
          e.gated,
          any};
}

// T, here and below: the type of lhs.
template <typename T>
__device__ float LoadElement(const void* data, bool is_float, int64_t i) {
  return is_float ? static_cast<const float*>(data)[i]
                  : static_cast<float>(static_cast<const T*>(data)[i]);
}

// Of channel `n` of `columns`, of product `product` (batch * weights_per_element of them).
template <typename T>
__device__ float LoadBias(const EpilogueParams& e, int64_t product, int64_t columns, int64_t n) {
  if (e.bias == nullptr || n >= columns) return 0.0f;
  return LoadElement<T>(e.bias, e.bias_float, product * columns + n);
}

template <typename T>
__device__ float LoadResidual(const EpilogueParams& e, int64_t offset) {
  return e.residual == nullptr ? 0.0f : LoadElement<T>(e.residual, e.residual_float, offset);
}

// x / (1 + exp(-y)). An error of the exponential is one of y in its last digits.
__device__ inline float TimesSigmoid(float x, float y) { return __fdividef(x, 1.0f + __expf(-y)); }

// As jax.nn has them, NaN for NaN; gelu_tanh by (1 + tanh(y)) / 2 = sigmoid(2 y).
__device__ inline float Activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return TimesSigmoid(x, x);
    case Activation::kGelu:
      return 0.5f * x * erfcf(-0.70710678f * x);
    case Activation::kGeluTanh:
      return TimesSigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
  }
  return x;
}

// Of sums with their biases; `up` only where the epilogue is gated.
__device__ inline float Finish(const EpilogueParams& e, float sum, float up, float residual) {
  const float value = Activate(e.activation, sum);
  return (e.gated ? value * up : value) + residual;
}

}  // namespace jaxlowbit
