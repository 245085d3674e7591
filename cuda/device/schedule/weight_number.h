// SPDX-License-Identifier: Apache-2.0
//
// Decodes entries of Buffers::index, for host and device.
#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

namespace jaxlowbit {

// Negative indices count from the end; indices out of range are clamped.
JAXLOWBIT_HOST_DEVICE inline int64_t WeightNumber(int64_t index, int64_t num_weights) {
  if (index < 0) index += num_weights;
  return index < 0 ? 0 : index < num_weights ? index : num_weights - 1;
}

}  // namespace jaxlowbit
