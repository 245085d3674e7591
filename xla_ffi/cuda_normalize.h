// SPDX-License-Identifier: Apache-2.0
//
// The normalize steps of a call (call.def): a kernel of their own, or part of the products behind them (MergeNorm in
// cuda/plan.h).
#pragma once

#include <memory>

#include "cuda/launch.h"
#include "cuda/ops/exchange.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

// The addresses of a step's buffers, by the names of its fields.
struct NormAddresses {
  Address x, addend, scales, total, out, out_scale;
};

// Checks the buffers of a step.
ffi::Error CheckNormalize(const Call& call, const Step& step);

// Loads the kernel of a step that has been checked.
std::unique_ptr<const LoadedStep> LoadNormalize(const Call& call, const Step& step,
                                                const NormAddresses& addresses, float epsilon,
                                                const Exchange& exchange, const Device& device);

// The same for products to merge, without an exchange.
PlannedNorm NormOf(const Call& call, const Step& step, const NormAddresses& addresses,
                   float epsilon);

}  // namespace jaxlowbit
