// SPDX-License-Identifier: Apache-2.0
//
// Caches choices. Programs multiply the same few shapes repeatedly, and a choice depends only on the
// problem, the device and the table of measured choices.
#pragma once

#include "cuda/select/select.h"

namespace jaxlowbit {

// Cached Select, shared by all threads. The cache is cleared after a few thousand different problems. The key includes
// the tuned table.
Choice SelectCached(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
                    const TunedTable* tuned = nullptr);

}  // namespace jaxlowbit
