// SPDX-License-Identifier: Apache-2.0
//
// A device of a group receives rows from the others in its inbox (protocol: ops/exchange.cuh).
#pragma once

#include <cstdint>

namespace jaxlowbit {

inline constexpr int kMaxExchangeParts = 8;   // devices of a group
inline constexpr int kMaxExchangeWarps = 32;  // that share a row

// The inboxes of a group, as seen by one device.
struct Inboxes {
  int parts = 1;       // devices of the group
  int rank = 0;        // of this device in the group
  int row_pieces = 0;  // 16-byte pieces of a row
  // This device's exchanges so far, [kMaxExchangeRows, kMaxExchangeWarps].
  uint32_t* rounds = nullptr;
  void* of[kMaxExchangeParts] = {};  // by rank
};

}  // namespace jaxlowbit
