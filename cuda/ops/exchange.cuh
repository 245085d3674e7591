// SPDX-License-Identifier: Apache-2.0
//
// One-step all-reduce of a row over the devices of a group, which run the same kernels in the same order.
//
// NCCL's LL protocol: each float is sent with its round number in one atomic 8-byte store, so the data are their own
// flag, and no fence is needed. A thread sends its columns to all peers, then reads the same columns of the peers.
// Rounds alternate between two halves of the inbox. A device may send round r + 2 to a peer after receiving anything of
// round r + 1 from it: that peer's kernel of round r has ended, so it has read the half.
//
// Like any collective, this waits for the slowest device.
#pragma once

#include <cstdint>

#include "cuda/ops/exchange.h"

namespace jaxlowbit {

// Inbox position of two consecutive columns from rank `from`: two pairs of float and round.
__device__ inline int64_t InboxPlace(const Exchange& e, int64_t row, uint32_t round, int from,
                                     int64_t column) {
  return ((row * 2 + round % 2) * e.parts + from) * (e.columns / 2) + column / 2;
}

__device__ inline uint64_t WithRound(float value, uint32_t round) {
  return static_cast<uint64_t>(round) << 32 | __float_as_uint(value);
}

__device__ inline void Send(uint4* place, float a, float b, uint32_t round) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};\n" ::"l"(place),
               "l"(WithRound(a, round)), "l"(WithRound(b, round))
               : "memory");
}

// Waits for both columns of this round.
__device__ inline float2 Receive(const uint4* place, uint32_t round) {
  uint64_t a, b;
  do {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];\n"
                 : "=l"(a), "=l"(b)
                 : "l"(place)
                 : "memory");
  } while (static_cast<uint32_t>(a >> 32) != round || static_cast<uint32_t>(b >> 32) != round);
  return {__uint_as_float(static_cast<uint32_t>(a)), __uint_as_float(static_cast<uint32_t>(b))};
}

// Sends consecutive columns of a row to all other devices.
template <int kColumns>
__device__ void SendColumns(const Exchange& e, int64_t row, uint32_t round, int64_t column,
                            const float (&values)[kColumns]) {
  for (int to = 0; to < e.parts; ++to) {
    if (to == e.rank) continue;
    uint4* place = e.inboxes[to] + InboxPlace(e, row, round, e.rank, column);
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) Send(place + i / 2, values[i], values[i + 1], round);
  }
}

// Replaces columns by their sums over all devices, in rank order, so that all devices get the same bits.
template <int kColumns>
__device__ void AddColumns(const Exchange& e, int64_t row, uint32_t round, int64_t column,
                           float (&values)[kColumns]) {
  float sums[kColumns] = {};
  for (int from = 0; from < e.parts; ++from) {
    const uint4* place = e.inboxes[e.rank] + InboxPlace(e, row, round, from, column);
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      const float2 two =
          from == e.rank ? float2{values[i], values[i + 1]} : Receive(place + i / 2, round);
      sums[i] += two.x;
      sums[i + 1] += two.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) values[i] = sums[i];
}

}  // namespace jaxlowbit
