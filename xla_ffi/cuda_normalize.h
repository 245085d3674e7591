// SPDX-License-Identifier: Apache-2.0
//
// The normalize steps of a call (call.def): a kernel of their own, or part of the products behind them (MergeNorm in
// cuda/plan.h).
#pragma once

#include <memory>

#include "cuda/launch.h"
#include "cuda/ops/exchange.h"
#include "cuda/ops/rms_norm.h"
#include "xla_ffi/call.h"
#include "xla_ffi/cuda_experts.h"

namespace jaxlowbit {

// Checks the buffers of a step.
ffi::Error CheckNormalize(const Call& call, const Step& step);

// The normalization of a step that has been checked, without pointers.
RmsNorm ReadNorm(const Call& call, const Step& step, float epsilon, const Exchange& exchange);

std::unique_ptr<const LoadedStep> LoadNormalize(const RmsNorm& norm, const NormAddresses& addresses,
                                                const Device& device);

// The same for products to merge.
PlannedNorm PlannedNormOf(const RmsNorm& norm, const NormAddresses& addresses);

}  // namespace jaxlowbit
