// SPDX-License-Identifier: Apache-2.0
//
// Times what a stream is given, captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace jaxlowbit::check {

// Median microseconds of `replays` replays, after `warm_ups` others, of what `enqueue` gives the stream that it gets.
float TimeReplays(const std::function<void(cudaStream_t)>& enqueue, int warm_ups, int replays);

}  // namespace jaxlowbit::check
