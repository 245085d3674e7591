// SPDX-License-Identifier: Apache-2.0
//
// A random decoder for the walk, and the exact results of its steps.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/kernels/sm90_stream/walk.h"

namespace jaxlowbit::check {

// Weights, activations and traces on the GPU.
class WalkModel {
 public:
  explicit WalkModel(const sm90_stream::WalkShape& shape);

  const sm90_stream::WalkShape& shape() const { return shape_; }
  int64_t layer_bytes() const;  // of weights and scales

  // Buffers of a launch. Stamps: null or of a caller.
  sm90_stream::WalkBuffers buffers(bool trace, unsigned long long* stamps) const;

  // Forgets earlier launches, and sets the x, q, k and v that begin a walk, of epoch 1.
  void Start();

  // The error word, zero if all waits ended in time.
  unsigned long long Error() const;

  // The maximum ratio of error to bound over all results of the last launch with a trace. Each step is computed from the
  // trace of the step before. `continues`: the launch began with the results of the previous one.
  double ErrorOverBound(bool continues);
  // A hash of the bits of the trace.
  uint64_t Digest() const;

 private:
  int64_t TraceCount(int step) const;
  double StepErrorOverBound(int layer, int step, bool continues);

  sm90_stream::WalkShape shape_;
  std::vector<DeviceBuffer> packed_, scales_, norms_, results_, traces_, first_;
  DeviceBuffer counts_, error_, normalized_, worst_;
};

}  // namespace jaxlowbit::check
