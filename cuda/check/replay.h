// SPDX-License-Identifier: Apache-2.0
//
// Times work enqueued on a stream, captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace jaxlowbit::check {

// Median microseconds of `replays` replays, after `warm_ups` others, of the work that `enqueue` adds to its stream.
float TimeReplays(const std::function<void(cudaStream_t)>& enqueue, int warm_ups, int replays);

}  // namespace jaxlowbit::check
