// SPDX-License-Identifier: Apache-2.0
//
// Times choices on the device, as XLA runs them: captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// How long choices are timed: graphs are replayed until they have run for `warm_up_milliseconds`, so that clocks are
// those of a busy device, and then `replays` times each; fewer times, but not fewer than `least_replays`, if that would
// take more than `most_milliseconds`.
struct TimingEffort {
  float warm_up_milliseconds = 30;
  int least_replays = 20, replays = 20;
  float most_milliseconds = 0;
};

// Median microseconds of a product by each of `choices`. A graph has one product for each element of `calls`: give them
// weights that together are too large for L2. Graphs are replayed in turn, so that a change of clocks meets all choices
// alike. The first call does not use PDL. Waits for the device.
cudaError_t TimeChoices(const QuantizedMatmul& problem, const std::vector<Buffers>& calls,
                        const std::vector<Choice>& choices, int device,
                        std::vector<float>* microseconds, const TimingEffort& effort = {});

}  // namespace jaxlowbit
