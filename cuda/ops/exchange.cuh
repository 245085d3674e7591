// SPDX-License-Identifier: Apache-2.0
//
// One-step all-reduce of rows over the devices of a group, which run the same kernels in the same order.
//
// A warp sends its columns of a row to the inboxes of all peers, then polls the same columns in its own inbox. A float is
// its own flag: an inbox is filled with kNotThere, a NaN that is never sent. So nothing but the atomicity of 4-byte
// elements is assumed, no fence is needed, and each float crosses the link once. The receiver refills an element after reading it.
//
// Inboxes have two halves for odd and even rounds. A device sends round r + 2 of a row only after it has received all
// of round r + 1 from a peer. The peer's kernel of round r has ended by then, so it has read and refilled the half.
//
// A warp's piece is 16 bytes a lane, 512 contiguous bytes, so packets on the link are full.
//
// A wait ends after Exchange::patience: the device marks the group as stopped, and results are NaN from then on.
#pragma once

#include <cstdint>

#include "cuda/ops/exchange.h"

namespace jaxlowbit {

inline constexpr int kExchangeColumns = 8;       // of a lane: two pieces
inline constexpr uint32_t kNotThere = ~0u;       // bits of a float that has not arrived
inline constexpr int kPollsBetweenChecks = 256;  // of the time
// Peers whose pieces are loaded before the first is tested.
#if __CUDA_ARCH__ >= 900
inline constexpr int kMaxPeersAtOnce = 3;
#else
inline constexpr int kMaxPeersAtOnce = 1;  // a thread of 1024 has 64 registers
#endif

// First piece of eight columns from rank `from`; the second is 32 later.
__device__ inline int InboxPlace(const Exchange& e, int row, uint32_t round, int from, int vector) {
  return ((row * 2 + round % 2) * e.parts + from) * e.row_pieces + vector / 32 * 64 + vector % 32;
}

__device__ inline void StoreToSystem(uint4* place, uint4 piece) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(place), "r"(piece.x),
               "r"(piece.y), "r"(piece.z), "r"(piece.w)
               : "memory");
}

__device__ inline uint4 LoadFromSystem(const uint4* place) {
  uint4 piece;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(place)
               : "memory");
  return piece;
}

__device__ inline uint32_t LoadFromSystem(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];\n" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void StoreToSystem(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;\n" ::"l"(word), "r"(value) : "memory");
}

// The bits of a float to send.
__device__ inline uint32_t BitsToSend(float value) {
  return min(__float_as_uint(value), kNotThere - 1);
}

__device__ inline uint32_t Largest(uint4 piece) {
  return max(max(piece.x, piece.y), max(piece.z, piece.w));
}

__device__ inline bool AreThere(const uint4 (&pieces)[2]) {
  return max(Largest(pieces[0]), Largest(pieces[1])) != kNotThere;
}

// A polling loop's time.
class Patience {
 public:
  __device__ explicit Patience(const Exchange& e) : e_(e) {}

  // Whether to poll again.
  __device__ bool Lasts() {
    if (++polls_ % kPollsBetweenChecks != 0) return true;
    if (LoadFromSystem(&e_.states[e_.rank]->stopped) != 0) return false;
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(nanoseconds));
    const auto now = static_cast<uint32_t>(nanoseconds >> 20);
    if (polls_ == kPollsBetweenChecks) start_ = now;
    return now - start_ < e_.patience;
  }

 private:
  const Exchange& e_;
  uint32_t polls_ = 0;
  uint32_t start_ = 0;
};

// Marks the group as stopped by a wait for rank `from`, unless another wait did.
__device__ inline void StopGroup(const Exchange& e, int from) {
  if (LoadFromSystem(&e.states[e.rank]->stopped) != 0) return;
  StoreToSystem(e.failure, FailedWait{e.rank, from}.Number());
#pragma unroll 1
  for (int i = 0; i < e.parts; ++i) StoreToSystem(&e.states[i]->stopped, 1u);
}

// A lane's share of the exchange of one row. All lanes of a warp construct it together. `warp`: the warp's number in the
// row.
class RowExchange {
 public:
  __device__ RowExchange(const Exchange& e, int row, int warp) : e_(e), row_(row) {
    ExchangeState& state = *e.states[e.rank];
    uint32_t* count = &state.rounds[row][warp];
    stopped_ = LoadFromSystem(&state.stopped) != 0;
    round_ = *count + 1;
    __syncwarp();  // all lanes have read the count
    if (threadIdx.x % 32 == 0) *count = round_;
  }

  // Sends eight consecutive columns to all other devices.
  __device__ void Send(int vector, const float (&values)[kExchangeColumns]) const {
    if (stopped_) return;
    uint4 pieces[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pieces[i] = {BitsToSend(values[4 * i]), BitsToSend(values[4 * i + 1]),
                   BitsToSend(values[4 * i + 2]), BitsToSend(values[4 * i + 3])};
    }
    const int place = InboxPlace(e_, row_, round_, e_.rank, vector);
#pragma unroll
    for (int i = 1; i < kMaxExchangeParts; ++i) {
      if (i >= e_.parts) break;
      const int to = e_.rank + i < e_.parts ? e_.rank + i : e_.rank + i - e_.parts;
      StoreToSystem(e_.inboxes[to] + place, pieces[0]);
      StoreToSystem(e_.inboxes[to] + place + 32, pieces[1]);
    }
  }

  // Replaces eight columns by their sums over all devices, in rank order, so that all devices get the same bits; by NaN
  // if the group has stopped.
  __device__ void Add(int vector, float (&values)[kExchangeColumns]) const {
    float sums[kExchangeColumns] = {};
    const bool complete =
        !stopped_ && (e_.parts == 2 ? AddAll<1>(vector, values, sums)
                                    : AddAll<kMaxPeersAtOnce>(vector, values, sums));
#pragma unroll
    for (int i = 0; i < kExchangeColumns; ++i) {
      values[i] = complete ? sums[i] : __uint_as_float(0x7fffffff);
    }
  }

 private:
  // Peers are numbered by rank without this device.
  __device__ int peers() const { return e_.parts - 1; }
  __device__ int RankOf(int peer) const { return peer < e_.rank ? peer : peer + 1; }

  // Adds this device's values and the peers', kAtOnce peers at a time. Returns false if the group stops.
  template <int kAtOnce>
  __device__ bool AddAll(int vector, const float (&values)[kExchangeColumns],
                         float (&sums)[kExchangeColumns]) const {
    uint4* inbox = e_.inboxes[e_.rank] + InboxPlace(e_, row_, round_, 0, vector);
    for (int first = 0; first < peers(); first += kAtOnce) {
      uint4 pieces[kAtOnce][2];
      if (!Receive(first, inbox, pieces)) return false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i == e_.rank) AddTo(sums, values);
        if (first + i < peers()) AddTo(sums, pieces[i]);
      }
    }
    if (e_.rank == peers()) AddTo(sums, values);
    return true;
  }

  // Waits for the pieces of several peers from `first` on, and empties their places. Returns false if the group stops.
  template <int kAtOnce>
  __device__ bool Receive(int first, uint4* inbox, uint4 (&pieces)[kAtOnce][2]) const {
    uint4* from
        [kAtOnce];  // the last peer's for those beyond it, so that the loads have no branches between them
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      from[i] = inbox + RankOf(min(first + i, peers() - 1)) * e_.row_pieces;
    }
    Patience patience(e_);
    int missing;  // a peer that has not sent, or -1
    do {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        pieces[i][0] = LoadFromSystem(from[i]);
        pieces[i][1] = LoadFromSystem(from[i] + 32);
      }
      missing = -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!AreThere(pieces[i])) missing = min(first + i, peers() - 1);
      }
    } while (missing >= 0 && patience.Lasts());
    if (missing >= 0) {
      StopGroup(e_, RankOf(missing));
      return false;
    }
    const uint4 empty = {kNotThere, kNotThere, kNotThere, kNotThere};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= peers()) break;
      StoreToSystem(from[i], empty);
      StoreToSystem(from[i] + 32, empty);
    }
    return true;
  }

  __device__ static void AddTo(float (&sums)[kExchangeColumns],
                               const float (&values)[kExchangeColumns]) {
#pragma unroll
    for (int i = 0; i < kExchangeColumns; ++i) sums[i] += values[i];
  }

  __device__ static void AddTo(float (&sums)[kExchangeColumns], const uint4 (&pieces)[2]) {
    const float values[kExchangeColumns] = {
        __uint_as_float(pieces[0].x), __uint_as_float(pieces[0].y), __uint_as_float(pieces[0].z),
        __uint_as_float(pieces[0].w), __uint_as_float(pieces[1].x), __uint_as_float(pieces[1].y),
        __uint_as_float(pieces[1].z), __uint_as_float(pieces[1].w)};
    AddTo(sums, values);
  }

  const Exchange& e_;
  int row_;
  uint32_t round_;
  bool stopped_;
};

}  // namespace jaxlowbit
