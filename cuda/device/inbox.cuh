// SPDX-License-Identifier: Apache-2.0
//
// Sends pieces of rows, four floats each, to the inboxes of other devices (ops/exchange.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/inboxes.h"

namespace jaxlowbit {

inline constexpr int kPieceColumns = 4;
inline constexpr uint32_t kNotThere = ~0u;  // bits of a float that has not arrived

// The place, in each inbox, of a row that rank `from` sends in a round.
__device__ inline int InboxRow(const Inboxes& to, int row, uint32_t round, int from) {
  return ((row * 2 + static_cast<int>(round % 2)) * to.parts + from) * to.row_pieces;
}

__device__ inline void StoreToSystem(uint4* place, uint4 piece) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(place), "r"(piece.x),
               "r"(piece.y), "r"(piece.z), "r"(piece.w)
               : "memory");
}

// Starts loading a word that is read again soon.
__device__ inline void LoadToL1(const uint32_t* word) {
  [[maybe_unused]] uint32_t unused;
  asm volatile("ld.global.b32 %0, [%1];\n" : "=r"(unused) : "l"(word));
}

// The bits of a float to send.
__device__ inline uint32_t BitsToSend(float value) {
  return min(__float_as_uint(value), kNotThere - 1);
}

// Stores a piece at a place of all other devices' inboxes.
__device__ inline void SendPiece(const Inboxes& to, int place, uint4 piece) {
#pragma unroll
  for (int i = 1; i < kMaxExchangeParts; ++i) {
    if (i >= to.parts) break;
    const int rank = to.rank + i < to.parts ? to.rank + i : to.rank + i - to.parts;
    StoreToSystem(static_cast<uint4*>(to.of[rank]) + place, piece);
  }
}

}  // namespace jaxlowbit
