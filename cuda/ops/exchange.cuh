// SPDX-License-Identifier: Apache-2.0
//
// One-step all-reduce of rows over the devices of a group, which run the same kernels in the same order.
//
// Columns of a row are sent to the inboxes of all peers, either by the warp that then polls the same columns in its own
// inbox, or by the product (kernels/sm90_stream/reduce.cuh). A float is its own flag: an inbox is filled with kNotThere,
// a NaN that is never sent. So nothing but the atomicity of 4-byte elements is assumed, no fence is needed, and each
// float crosses the link once. The receiver refills an element after reading it.
//
// Inboxes have two halves for odd and even rounds. A device sends round r + 2 of a row only after it has received all
// of round r + 1 from a peer. The peer's kernel of round r has ended by then, so it has read and refilled the half.
//
// A product that sends writes its own inbox too, and the receiver does not wait for its end, which took as long as if the
// receiver had sent the row (docs/measurements/decode_step.md). Whatever else the receiver reads must have been written
// before it starts, so a kernel since the last exchange holds the next one until that exchange has ended
// (PlannedStep::holds_next).
//
// Lanes store and load neighbouring pieces, so that packets on the link are full, and exchange them by shuffles.
//
// A wait ends after Exchange::patience: the device marks the group as stopped, and results are NaN from then on.
#pragma once

#include <cstdint>

#include "cuda/device/inbox.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/ops/exchange.h"

namespace jaxlowbit {

inline constexpr int kExchangeColumns = 8;       // of a lane: two pieces
inline constexpr int kPollsBetweenChecks = 256;  // of the time
// Whether products may send, and devices whose pieces are loaded before the first is tested.
#if __CUDA_ARCH__ == 900
inline constexpr bool kProductsSend = true;
inline constexpr int kMaxAtOnce = 2;
#else
inline constexpr bool kProductsSend = false;
inline constexpr int kMaxAtOnce = 1;  // registers do not suffice for more
#endif

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

// The exchanges of a row so far, counted by a warp.
__device__ inline uint32_t* RoundsOf(const Exchange& e, int row, int warp) {
  return &e.rounds[row * kMaxExchangeWarps + warp];
}

// A lane's share of the exchange of one row. All lanes of a warp call each function together.
class RowExchange {
 public:
  // `round`: the count of the warp, plus 1. `sent`: the product before sends its result to all devices, this one included.
  __device__ RowExchange(const Exchange& e, int row, uint32_t round, bool sent)
      : e_(e), row_(row), round_(round), sent_(kProductsSend && sent) {
    stopped_ = LoadFromSystem(&e.states[e.rank]->stopped) != 0;
  }

  // Sends eight consecutive columns of each lane to all other devices, if the row has that vector, unless the product does.
  __device__ void Send(int vector, int vectors, const float (&values)[kExchangeColumns]) const {
    if (sent_ || __any_sync(~0u, stopped_)) return;
    const int place = InboxRow(e_, row_, round_, e_.rank), lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 512 contiguous bytes
      const int from = 16 * i + lane / 2;
      uint32_t words[kPieceColumns];
#pragma unroll
      for (int j = 0; j < kPieceColumns; ++j) {
        const float low = __shfl_sync(~0u, values[j], from);
        const float high = __shfl_sync(~0u, values[kPieceColumns + j], from);
        words[j] = BitsToSend(lane % 2 == 0 ? low : high);
      }
      const int sent = vector - lane + from;
      if (sent >= vectors) continue;
      SendPiece(e_, place + 2 * sent + lane % 2, {words[0], words[1], words[2], words[3]});
    }
  }

  // Replaces eight columns, which are unspecified if they were sent, by their sums over all devices, in rank order, so
  // that all devices get the same bits; by NaN if the group has stopped.
  __device__ void Add(int vector, int vectors, float (&values)[kExchangeColumns]) const {
    float sums[kExchangeColumns] = {};
    const bool complete = !__any_sync(~0u, stopped_) &&
                          (senders() == 1 ? AddAll<1>(vector, vectors, values, sums)
                                          : AddAll<kMaxAtOnce>(vector, vectors, values, sums));
#pragma unroll
    for (int i = 0; i < kExchangeColumns; ++i) {
      values[i] = complete ? sums[i] : __uint_as_float(0x7fffffff);
    }
  }

 private:
  // Senders are numbered by rank, without this device unless the product sends.
  __device__ int senders() const { return e_.parts - !sent_; }
  __device__ int RankOf(int sender) const {
    return sent_ || sender < e_.rank ? sender : sender + 1;
  }

  // Adds the values of all devices, kAtOnce senders at a time. Returns false if the group stops.
  template <int kAtOnce>
  __device__ bool AddAll(int vector, int vectors, const float (&values)[kExchangeColumns],
                         float (&sums)[kExchangeColumns]) const {
    const int lane = threadIdx.x % 32, first_piece = 2 * (vector - lane) + lane;
    uint4* inbox =
        static_cast<uint4*>(e_.of[e_.rank]) + InboxRow(e_, row_, round_, 0) + first_piece;
    const bool has[2] = {first_piece < 2 * vectors, first_piece + 32 < 2 * vectors};
    for (int first = 0; first < senders(); first += kAtOnce) {
      uint4 pieces[kAtOnce][2] = {};
      const bool ok = !has[0] || Receive(first, inbox, has[1], pieces);
      if (__any_sync(~0u, !ok)) return false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= senders()) break;  // with an odd number, at the end
        if (!sent_ && first + i == e_.rank) AddTo(sums, values);
        Transpose(pieces[i]);
        AddTo(sums, pieces[i]);
      }
    }
    if (!sent_ && e_.rank == senders()) AddTo(sums, values);
    return true;
  }

  // From pieces `lane` and `lane` + 32 of a warp's 64 to 2 `lane` and 2 `lane` + 1.
  __device__ static void Transpose(uint4 (&pieces)[2]) {
    const int lane = threadIdx.x % 32;
    uint4 own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto take = [&](uint32_t first, uint32_t last) {
        const int from = (2 * lane + i) % 32;
        first = __shfl_sync(~0u, first, from);
        last = __shfl_sync(~0u, last, from);
        return lane < 16 ? first : last;
      };
      own[i] = {take(pieces[0].x, pieces[1].x), take(pieces[0].y, pieces[1].y),
                take(pieces[0].z, pieces[1].z), take(pieces[0].w, pieces[1].w)};
    }
    pieces[0] = own[0], pieces[1] = own[1];
  }

  // Waits for the pieces of several senders from `first` on, and empties their places. Returns false if the group stops.
  template <int kAtOnce>
  __device__ bool Receive(int first, uint4* inbox, bool both, uint4 (&pieces)[kAtOnce][2]) const {
    // The last sender's for those beyond it, so that the loads have no branches between them.
    uint4* from[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      from[i] = inbox + RankOf(min(first + i, senders() - 1)) * e_.row_pieces;
    }
    Patience patience(e_);
    int missing;  // a sender whose values have not arrived, or -1
    do {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        pieces[i][0] = LoadFromSystem(from[i]);
        pieces[i][1] = LoadFromSystem(from[i] + (both ? 32 : 0));
      }
      missing = -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!AreThere(pieces[i])) missing = min(first + i, senders() - 1);
      }
    } while (missing >= 0 && patience.Lasts());
    if (missing >= 0) {
      StopGroup(e_, RankOf(missing));
      return false;
    }
    const uint4 empty = {kNotThere, kNotThere, kNotThere, kNotThere};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= senders()) break;
      StoreToSystem(from[i], empty);
      if (both) StoreToSystem(from[i] + 32, empty);
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
  bool sent_, stopped_;
};

}  // namespace jaxlowbit
