// SPDX-License-Identifier: Apache-2.0
//
// Times choices in a CUDA graph, as XLA runs them.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Replays graphs for at least `warm_up_milliseconds`, until the clocks have settled, then `replays` times
// each; fewer, but at least `min_replays`, if that would exceed `max_milliseconds`.
struct TimingEffort {
  float warm_up_milliseconds = 30;
  int min_replays = 20, replays = 20;
  float max_milliseconds = 0;
};

// Median microseconds of a product with each of `choices`. A graph contains one product per element of `calls`;
// together their weights should exceed L2. Graphs are replayed round-robin, so that clock changes affect all choices
// alike. The first product of a graph does not use PDL. Synchronizes with the device.
cudaError_t TimeChoices(const QuantizedMatmul& problem, const std::vector<Buffers>& calls,
                        const std::vector<Choice>& choices, int device,
                        std::vector<float>* microseconds, const TimingEffort& effort = {});

}  // namespace jaxlowbit
