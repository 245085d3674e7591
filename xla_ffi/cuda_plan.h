// SPDX-License-Identifier: Apache-2.0
//
// Plans a call on CUDA: checks it, plans the launches of its steps, and loads the kernels. Executions of the same call
// run the plan (plan_cache.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/ways.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

struct LoadedCall {
  struct Step {
    std::unique_ptr<const LoadedStep> run;
    std::string what;  // it does, for errors
  };
  std::vector<Step> steps;
  bool exchanges = false;  // with other devices, whose failure ends the next execution
};

// Decodes a call and plans it for a device. `ways`: of the call's pointers, operands before results.
ffi::Error PlanCall(Call* call, const Target& target, Ways* ways, LoadedCall* loaded);

// The products of a call, planned from its attributes only, for instances to compile early; none if sizes are symbolic.
// `divided`: several devices run the call. (cuda_attributes.cc)
std::vector<PlannedStep> PlanAttributes(const std::vector<Product>& products,
                                        const std::vector<Step>& steps, bool divided,
                                        const Target& target);

}  // namespace jaxlowbit
