// SPDX-License-Identifier: Apache-2.0
//
// The router of a mixture of experts in a decode step: the experts of each token, and their weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// logits = x @ router + bias, in float32. A token chooses the `top` largest, the largest first; the first expert wins
// among equal logits. NaN counts as the largest. Weights are exp(logit - largest logit), divided by the sum of these
// over the choices if `normalized`, else over all experts. UnsupportedRoute (limits.h) has no reason against the sizes.
struct RouteChoices {
  ElementType x_type;                  // kBf16 or kF16
  ElementType router_type, bias_type;  // kF32, kBf16 or kF16
  int tokens;
  int top;
  int experts;
  int64_t columns;
  bool normalized;
  bool pdl;  // the previous kernel belongs to the same call; it writes neither router nor bias
  const void* x = nullptr;       // [tokens, columns]
  const void* router = nullptr;  // [columns, experts]
  const void* bias = nullptr;    // [experts], or null
  int32_t* expert = nullptr;     // [tokens, top]
  float* weight = nullptr;       // [tokens, top]
};

cudaError_t PrepareRouteChoices();

// Enqueues the computation of expert and weight, whose bits do not depend on the order of threads. Needs clusters.
cudaError_t LaunchRouteChoices(const RouteChoices& route, cudaStream_t stream);

}  // namespace jaxlowbit
