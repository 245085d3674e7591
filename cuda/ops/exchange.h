// SPDX-License-Identifier: Apache-2.0
//
// Peer memory for exchanging rows between devices of one process. Each device has an inbox that its peers write to over
// NVLink or PCIe, from inside a kernel. Protocol: exchange.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace jaxlowbit {

inline constexpr int kMaxExchangeParts = 8;  // devices of a group

// The exchange memory, as seen by one device.
struct Exchange {
  int parts = 1;  // devices of the group
  int rank = 0;   // of this device in the group
  int64_t columns = 0;
  uint4* inboxes[kMaxExchangeParts] = {};  // of all devices, by rank
  uint32_t* rounds = nullptr;              // number of exchanges per row, in this device's memory
};

// Whether all devices (CUDA ordinals) can write to each other's memory.
bool CanExchange(const std::vector<int>& devices);

// Returns the exchange memory of a group, as seen by `device`, for rows of `columns` floats. The first call for a group
// allocates it on all devices, so it must not run during stream capture. Never freed.
cudaError_t FindExchange(const std::vector<int>& devices, int device, int64_t columns,
                         Exchange* exchange);

}  // namespace jaxlowbit
