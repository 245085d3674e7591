// SPDX-License-Identifier: Apache-2.0
//
// Peer memory for exchanging rows between devices of one process. Each device has an inbox that its peers write to over
// NVLink or PCIe, from inside a kernel. Protocol: exchange.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device/host_device.h"
#include "cuda/device/inboxes.h"
#include "cuda/limits.h"

namespace jaxlowbit {

// Counters of one device of a group, in its memory.
struct ExchangeState {
  uint32_t stopped;  // not 0: a device of the group gave up waiting, and nobody waits any more
  uint32_t rounds[kMaxExchangeRows][kMaxExchangeWarps];  // exchanges so far, by row and warp
};

// The exchange memory, as seen by one device. Arrays are by rank.
struct Exchange : Inboxes {
  uint32_t patience = 20'000;  // in 2^20 nanoseconds: how long a kernel waits for a row
  ExchangeState* states[kMaxExchangeParts] = {};
  uint32_t* failure = nullptr;  // host memory: FailedWait of the wait that gave up, or 0
};

// The wait of `rank` for a row of `from`, as a number that is not 0.
struct FailedWait {
  int rank, from;
  JAXLOWBIT_HOST_DEVICE uint32_t Number() const { return 1u << 16 | rank << 8 | from; }
  static FailedWait Of(uint32_t number) {
    return {static_cast<int>(number >> 8 & 0xff), static_cast<int>(number & 0xff)};
  }
};

// 16-byte pieces of a row in an inbox: two for each lane of whole warps. And the bytes of an inbox.
constexpr int RowPieces(int64_t columns) {
  constexpr int64_t kWarpColumns = 256, kWarpPieces = 64;
  return static_cast<int>(CeilDiv(columns, kWarpColumns) * kWarpPieces);
}
constexpr int64_t InboxBytes(int parts, int row_pieces) {
  return 2 * kMaxExchangeRows * parts * row_pieces * int64_t{sizeof(uint4)};
}

// Whether all devices (CUDA ordinals) can write to each other's memory.
bool CanExchange(const std::vector<int>& devices);

// Returns the exchange memory of a group, as seen by `device`, for rows of `columns` floats. The first call for a group
// allocates it on all devices, so it must not run during stream capture. Never freed.
cudaError_t FindExchange(const std::vector<int>& devices, int device, int64_t columns,
                         Exchange* exchange);

// A sentence about the devices of a group that gave up waiting for each other, or an empty string.
std::string ExchangeFailure();

// Returns ExchangeFailure() and makes the groups ready again: waits until their devices are idle, then empties inboxes.
std::string TakeExchangeFailure();

}  // namespace jaxlowbit
