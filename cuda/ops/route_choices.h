// SPDX-License-Identifier: Apache-2.0
//
// The router of a mixture of experts in a decode step: the experts of each token, and their weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/ops/rms_norm.h"
#include "cuda/types.h"

namespace jaxlowbit {

// logits = x @ router + bias, in float32. A token chooses the `top` largest, the largest first; the first expert wins
// among equal logits. NaN counts as the largest. Weights are exp(logit - largest logit), divided by the sum of these
// over the choices if `normalized`, else over all experts. UnsupportedRoute (limits.h) has no reason against the sizes.
struct RouteChoices {
  ElementType x_type = ElementType::kBf16;  // kBf16 or kF16
  ElementType router_type = ElementType::kF32,
              bias_type = ElementType::kF32;  // kF32, kBf16 or kF16
  int tokens = 0;
  int top = 0;
  int experts = 0;
  int64_t columns = 0;
  bool normalized = false;
  bool pdl =
      false;  // the previous kernel belongs to the same call; it writes neither router nor bias
  const void* x = nullptr;       // [tokens, columns]
  const void* router = nullptr;  // [columns, experts]
  const void* bias = nullptr;    // [experts], or null
  int32_t* expert = nullptr;     // [tokens, top]
  float* weight = nullptr;       // [tokens, top]
  // If it has rows, they are the tokens, and x is its result: see SupportsNorm. Its sum must not overlap its operands.
  RmsNorm norm = {};
};

// Whether the router normalizes its rows itself. All buffers must be aligned.
bool SupportsNorm(const RouteChoices& route, const RmsNorm& norm);

cudaError_t PrepareRouteChoices();

// Enqueues the computation of expert and weight, whose bits do not depend on the order of threads. Needs clusters.
cudaError_t LaunchRouteChoices(const RouteChoices& route, cudaStream_t stream);

}  // namespace jaxlowbit
