// SPDX-License-Identifier: Apache-2.0
//
// The buffers that a step of a call reads and writes.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/call.h"

namespace jaxlowbit {

// Attention checks its own buffers, so its places are not listed.
std::vector<int64_t> PlacesRead(const Call& call, const Step& step);
std::vector<int64_t> PlacesWritten(const Call& call, const Step& step);

}  // namespace jaxlowbit
