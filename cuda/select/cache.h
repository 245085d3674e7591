// SPDX-License-Identifier: Apache-2.0
//
// Caches choices and support checks. Programs multiply the same few shapes repeatedly, and a choice depends only on the
// problem, the device and the table of measured choices.
#pragma once

#include "cuda/select/select.h"

namespace jaxlowbit {

// Cached Select, shared by all threads. The cache is cleared after a few thousand different problems. The key includes
// the tuned table.
Choice SelectCached(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
                    const TunedTable* tuned = nullptr);

// Cached Supports(kernel, problem, device), which costs as much as a choice.
Support SupportsCached(Kernel kernel, const QuantizedMatmul& problem, const Device& device);

// Cached Supports(problem, device), which costs as much for two-level scales.
Support SupportsCached(const QuantizedMatmul& problem, const Device& device);

}  // namespace jaxlowbit
