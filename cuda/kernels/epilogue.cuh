// SPDX-License-Identifier: Apache-2.0
//
// The epilogue of all kernels (problem.h), in float32. A kernel passes a few accumulators of a thread at a time, in a
// loop that is not unrolled, to limit code size; register accumulators go through shared memory for that, since
// registers cannot be indexed.
#pragma once

#include <cstdint>

#include "cuda/device/approximate.cuh"
#include "cuda/device/schedule/batched.cuh"
#include "cuda/types.h"

namespace jaxlowbit {

// Kernel parameters of the epilogue.
struct EpilogueParams {
  const void* bias;                 // [batch * weights_per_element, n]; null: none
  const void* residual;             // [batch, m, n]; null: none
  bool bias_float, residual_float;  // float32; else the type of lhs
  Activation activation;
  bool gated;
  bool any;  // false: results are the accumulators, without units
};

// Kernel parameters of the units (problem.h): tensor or channel scales. Separate from EpilogueParams, because the
// placement of the other parameters in the constant bank affects speed.
struct UnitParams {
  const float* data;     // [num_weights, count]; null: 1
  const int32_t* index;  // null: weight min(product, num_weights - 1)
  int64_t num_weights;
  int64_t count;  // 1: one for each weight; else one for each channel
};

// The unit of channel `n` of `columns`, of product `product` (of batch * weights_per_element).
__device__ inline float LoadUnit(const UnitParams& u, int64_t product, int64_t columns, int64_t n) {
  if (u.data == nullptr || n >= columns) return 1.0f;
  const int64_t weight = WeightAt(u.index, u.num_weights, product);
  return u.data[weight * u.count + (u.count > 1 ? n : 0)];
}

// Raw bits of an element of a bias or residual. Converting later (ValueOf) lets several loads overlap.
__device__ inline uint32_t LoadBits(const void* data, bool is_float, int64_t i) {
  return is_float ? static_cast<const uint32_t*>(data)[i] : static_cast<const uint16_t*>(data)[i];
}

// T, here and below, is the type of lhs.
template <typename T>
__device__ float ValueOf(uint32_t bits, bool is_float) {
  if (is_float) return __uint_as_float(bits);
  const uint16_t half = static_cast<uint16_t>(bits);
  return static_cast<float>(reinterpret_cast<const T&>(half));
}

template <typename T>
__device__ float LoadElement(const void* data, bool is_float, int64_t i) {
  return ValueOf<T>(LoadBits(data, is_float, i), is_float);
}

// The bias of channel `n` of `columns`, of product `product` (of batch * weights_per_element).
template <typename T>
__device__ float LoadBias(const EpilogueParams& e, int64_t product, int64_t columns, int64_t n) {
  if (e.bias == nullptr || n >= columns) return 0.0f;
  return LoadElement<T>(e.bias, e.bias_float, product * columns + n);
}

template <typename T>
__device__ float LoadResidual(const EpilogueParams& e, int64_t offset) {
  return e.residual == nullptr ? 0.0f : LoadElement<T>(e.residual, e.residual_float, offset);
}

// x * sigmoid(linear * x + cubic * x^3): silu, and gelu_tanh, since (1 + tanh(y)) / 2 = sigmoid(2 y). Coefficients
// include the factor -log2(e), for exp2.
struct SigmoidForm {
  float linear, cubic;
};

__device__ inline SigmoidForm SigmoidFormOf(Activation activation) {
  return activation == Activation::kSilu ? SigmoidForm{-1.44269504f, 0.0f}
                                         : SigmoidForm{-2.30220820f, -2.30220820f * 0.044715f};
}

// The error is dominated by the rounding of the exponent's argument.
__device__ inline float TimesSigmoid(SigmoidForm form, float x) {
  const float square = fminf(x * x, 3e38f);  // finite, so that 0 may multiply it
  return x * Reciprocal(1.0f + Exp2(x * fmaf(form.cubic, square, form.linear)));
}

// x * Phi(x), with Phi(-y) = t * 2^(q(t) - log2(e) * y^2 / 2), t = 1 / (1 + 0.26 * y), for y >= 0. q is the minimax
// polynomial on (0, 14) with errors weighted by max(Phi, 1/16). Relative error 2.5e-6 for the smallest Phi; error of
// all results at most 1.5e-7 |x|.
__device__ inline float Gelu(float x) {
  constexpr float kFit[] = {-3.26632929f, 1.39869082f,  0.90027469f, -0.61772066f,
                            1.70985413f,  -1.54778683f, 0.42301700f};
  const float t = Reciprocal(fmaf(0.26f, fabsf(x), 1.0f));
  float q = kFit[6];
#pragma unroll
  for (int i = 5; i >= 0; --i) q = fmaf(q, t, kFit[i]);
  const float tail = t * Exp2(fmaf(-0.72134752f * x, x, q));
  return x * (x > 0.0f ? 1.0f - tail : tail);
}

__device__ inline float Relu(float x) { return x < 0.0f ? 0.0f : x; }

inline constexpr SigmoidForm kGptOssForm = {-1.702f * 1.44269504f, 0.0f};

__device__ inline float GptOssUp(float up) {
  return (up > kGptOssLimit ? kGptOssLimit : up < -kGptOssLimit ? -kGptOssLimit : up) + 1.0f;
}

// Activations of jax.nn, and of gpt-oss; NaN stays NaN. Takes several values, so that their instructions overlap inside one branch.
template <bool kRagged, int kCount>
__device__ void Activate(Activation activation, float (&x)[kCount]) {
  const auto each = [&](auto function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = function(x[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kSilu:
    case Activation::kGeluTanh: {
      const SigmoidForm form = SigmoidFormOf(activation);
      return each([form](float y) { return TimesSigmoid(form, y); });
    }
    case Activation::kGelu:
      return each([](float y) { return Gelu(y); });
    case Activation::kRelu:
      return each([](float y) { return Relu(y); });
    case Activation::kGptOss:
      if constexpr (!kRagged) return;
      return each(
          [](float y) { return TimesSigmoid(kGptOssForm, y > kGptOssLimit ? kGptOssLimit : y); });
  }
}

// Computes results from accumulators that include units and biases. `up` is used only by gated epilogues, kGptOss only
// by ragged products: elsewhere it would cost registers.
template <bool kRagged = false, int kCount>
__device__ void Finish(const EpilogueParams& e, const float (&up)[kCount],
                       const float (&residual)[kCount], float (&values)[kCount]) {
  Activate<kRagged>(e.activation, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float up_factor = up[i];
    if constexpr (kRagged) {
      if (e.activation == Activation::kGptOss) up_factor = GptOssUp(up_factor);
    }
    if (e.gated) values[i] *= up_factor;
    values[i] += residual[i];
  }
}

}  // namespace jaxlowbit
