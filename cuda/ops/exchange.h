// SPDX-License-Identifier: Apache-2.0
//
// Memory in which the devices of a group, all of this process, send each other rows. A device has an inbox that the
// others write to over NVLink or PCIe: no host and no further kernel is involved. The protocol is exchange.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace jaxlowbit {

inline constexpr int kMaxExchangeParts = 8;  // devices of a group

// The memory as one device sees it, for rows of so many floats.
struct Exchange {
  int parts = 1;  // devices of the group
  int rank = 0;   // of this device in the group
  int64_t columns = 0;
  uint4* inboxes[kMaxExchangeParts] = {};  // of all devices, by rank
  uint32_t* rounds = nullptr;              // how often each row was exchanged; own memory
};

// Whether every one of the devices, CUDA's numbers, can write to the memory of every other.
bool CanExchange(const std::vector<int>& devices);

// Finds the memory of a group for rows of `columns` floats, as `device` sees it. The first call for a group allocates
// it on all of its devices, for the life of the process, so it must not run while a stream is captured.
cudaError_t FindExchange(const std::vector<int>& devices, int device, int64_t columns,
                         Exchange* exchange);

}  // namespace jaxlowbit
