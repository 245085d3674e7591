// SPDX-License-Identifier: Apache-2.0
//
// Reduces the partial sums of a tile across the cluster. Every CTA owns some of the tile's slices, and every warp sends
// its partial sums of a slice to the owner's shared memory. The owner adds them in the order of senders, so that
// results repeat bit for bit, and stores them through the epilogue.
//
// Ragged. There are two buffers of partial sums. A tile's are reduced after the warp has multiplied the next tile, when
// all have arrived, so that no warp waits for others at the end of a tile.
#pragma once

#include "cuda/device/inbox.cuh"
#include "cuda/kernels/sm90_stream/multiply.cuh"

namespace jaxlowbit::sm90_stream {

template <class I>
class ClusterReducer {
 public:
  // `number`: of the CTA's tiles before.
  __device__ ClusterReducer(const Params& p, const Share& share, Memory memory, int number)
      : p_(p),
        share_(share),
        memory_(memory),
        number_(number),
        owned_(1 << p.plan.owned_shift),
        senders_(p.plan.warps_k << p.plan.cluster_shift) {}

  // Called by one thread, before the tile's partial sums can be complete.
  __device__ void Expect(int slices) const {
    if (UsesPlainStores()) return;
    ArriveExpecting(memory_.partials_full(Buffer()),
                    Owned(slices) * senders_ * I::kTiles * kFragmentBytes);
  }

  // The destination of a warp's partial sums of a slice: an address and a barrier in the owner's shared memory.
  struct Destination {
    uint32_t fragment, barrier;
  };
  // For slice `slice` of the tile and part `part` of the stages.
  __device__ Destination DestinationOf(int slice, int part) const {
    const int owner = slice >> p_.plan.owned_shift;
    const int sender = Rank() * p_.plan.warps_k + part;
    if (UsesPlainStores()) return {Fragment(slice, sender, 0), 0};
    return {MapToRank(Fragment(slice & (owned_ - 1), sender, 0), owner),
            MapToRank(memory_.partials_full(Buffer()), owner)};
  }
  __device__ void Send(const Destination& to, const float (&partials)[I::kTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < I::kTiles; ++tile) {
      const uint32_t target = to.fragment + tile * kFragmentBytes;
      if (UsesPlainStores()) {
        StoreShared16<0>(target, partials[tile]);
      } else {
        StoreRemote(target, partials[tile], to.barrier);
      }
    }
  }

  // Waits, before the tile's partial sums are sent, until all owners have read the previous ones of this buffer.
  __device__ void WaitUntilFree() const {
    if (number_ == 0) {
      // Waits until the barriers of all CTAs exist. Others have done so before.
      if constexpr (I::kRagged) WaitForArrivals();
    } else if (number_ >= kBuffers && !UsesPlainStores()) {
      WaitForCluster(memory_.partials_free(Buffer()), (number_ / kBuffers - 1) % 2);
    }
  }

  // Signals that this warp has read its partial sums of the tile; called if another tile uses the buffer. Not ragged:
  // one warp signals for the CTA.
  __device__ void Free() const {
    if (!I::kRagged || UsesPlainStores()) SynchronizeConsumers();
    if (UsesPlainStores()) return;
    if constexpr (I::kRagged) __syncwarp();
    const int thread = I::kRagged ? threadIdx.x % 32 : threadIdx.x;
    if (thread < 1 << p_.plan.cluster_shift) {
      ArriveRemoteAfterReads(MapToRank(memory_.partials_free(Buffer()), thread), true);
    }
  }

  // Waits for the partial sums of this CTA's slices of a tile of `slices` slices from `tile_slice` on, reduces and stores
  // them. Called by all consumers. Addresses are computed before the wait: afterwards each instruction delays the next
  // kernel.
  __device__ void Collect(int tile_slice, int slices) const {
    const EpilogueParams& e = p_.epilogue;
    const int warp = Opaque(threadIdx.x) / 32, fragments = Opaque(Fragments(slices));
    const int gated = Opaque(static_cast<int>(e.gated)), any = Opaque(static_cast<int>(e.any));
    const int senders = Opaque(senders_);
    const FirstAddends first = LoadFirst(tile_slice, fragments);
    Target target = TargetOf(tile_slice, warp);
    target.Pin();
    if (!I::kRagged && !UsesPlainStores() && warp >= fragments) return;
    WaitUntilSent();
#pragma unroll 1
    for (int fragment = warp; fragment < fragments; fragment += kWarps) {
      const int tile = fragment % I::kTiles, slice = fragment / I::kTiles;
      float sum[4];
      Add(gated ? 2 * slice : slice, tile, senders, sum);
      if (any) {
        float up[4] = {};
        if (gated) Add(2 * slice + 1, tile, senders, up);
        const Addends addends = fragment == warp            ? first.of[0]
                                : fragment == warp + kWarps ? first.of[1]
                                                            : LoadAddends(tile_slice, fragment);
        float residual[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[j] = fmaf(sum[j], addends.unit[j / 2],
                        ValueOf<typename I::T>(addends.bias[j / 2], e.bias_float));
          up[j] = fmaf(up[j], addends.up_unit[j / 2],
                       ValueOf<typename I::T>(addends.up_bias[j / 2], e.bias_float));
          residual[j] = ValueOf<typename I::T>(addends.residual[j], e.residual_float);
        }
        if (p_.apply_lhs_scale) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[j] *= residual[j];
        } else {
          Finish<kHasExperts<I>>(e, up, residual, sum);
        }
      }
      if constexpr (I::kLhsPath == LhsPath::kRounds) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[j] *= __uint_as_float(LoadShared4(memory_.row_scale(Row(tile) + j % 2)));
        }
      }
      if (Sends()) {
        Send(tile, Channel(tile_slice, slice), sum);
      } else {
        target.Store(sum);
      }
      if (fragment + kWarps < fragments) target = TargetOf(tile_slice, fragment + kWarps);
    }
  }

 private:
  static constexpr bool kIntegerWeights = I::kScaleAccumulators && I::kCodebook == Codebook::kNone;
  static constexpr float kUnit =  // of accumulators
      1 << (kIntegerWeights ? kShift<typename I::T>
                            : kProductShift<typename I::T, typename I::S, I::kCodebook>);
  static constexpr int kFragmentBytes = 32 * 16;  // 16 channels x 8 rows, in the order of lanes
  static constexpr int kBuffers = I::kRagged ? 2 : 1;

  // Waits for all partial sums of the tile that this CTA owns.
  __device__ void WaitUntilSent() const {
    if (UsesPlainStores()) {
      SynchronizeConsumers();
    } else {
      WaitForCluster(memory_.partials_full(Buffer()), number_ / kBuffers % 2);
    }
  }

  // Raw epilogue operands, factors and addends, for the accumulators that a thread reduces together.
  struct Addends {
    float unit[2], up_unit[2];     // of channels g and g + 8
    uint32_t bias[2], up_bias[2];  // likewise
    uint32_t residual[4];
  };

  // The addends of a thread's first two fragments of a tile, loaded while other warps still multiply.
  struct FirstAddends {
    Addends of[2];
  };
  __device__ FirstAddends LoadFirst(int tile_slice, int fragments) const {
    FirstAddends first = {};
    if (Sends()) {
      WaitForPreviousKernels();  // they may have counted a round
#pragma unroll
      for (int tile = 0; tile < I::kTiles; ++tile) LoadToL1(CountedRounds(tile));
    }
    if (!p_.epilogue.any) return first;
    WaitForPreviousKernels();  // they may have written the residual
    const int fragment = Opaque(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (fragment + i * kWarps < fragments) {
        first.of[i] = LoadAddends(tile_slice, fragment + i * kWarps);
      }
    }
    return first;
  }

  __device__ int Buffer() const { return number_ % kBuffers; }

  // Adds the partial sums of all senders for this lane.
  __device__ void Add(int slice, int tile, int senders, float (&sum)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = 0;
    for (int sender = 0; sender < senders; ++sender) {
      const uint4 part = LoadShared16(Fragment(slice, sender, tile));
      sum[0] += __uint_as_float(part.x);
      sum[1] += __uint_as_float(part.y);
      sum[2] += __uint_as_float(part.z);
      sum[3] += __uint_as_float(part.w);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] *= kUnit;
  }

  __device__ Addends LoadAddends(int tile_slice, int fragment) const {
    const EpilogueParams& e = p_.epilogue;
    const int own = OwnProduct(p_);
    const Product& part = p_.products[own];  // several products per launch: no biases or residuals
    const int m = Row(fragment % I::kTiles), n = Channel(tile_slice, fragment / I::kTiles);
    const auto schedule = ScheduleOf<I>(p_, share_);
    const int product = schedule.Position(share_.batch);
    // The position of up, which is next to the gate unless there are experts.
    const int up = kHasExperts<I> ? schedule.UpPosition(share_.batch) : product + 1;
    Addends addends = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      addends.unit[h] = LoadUnit(p_.units[own], product, part.n, n + 8 * h);
      addends.up_unit[h] = e.gated ? LoadUnit(p_.units[own], up, part.n, n + 8 * h) : 1.0f;
    }
    if (e.bias != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (n + 8 * h >= part.n) continue;
        const int64_t at = int64_t{product} * part.n + n + 8 * h;
        addends.bias[h] = LoadBits(e.bias, e.bias_float, at);
        const int64_t up_at = kHasExperts<I> ? int64_t{up} * part.n + n + 8 * h : at + part.n;
        if (e.gated) addends.up_bias[h] = LoadBits(e.bias, e.bias_float, up_at);
      }
    }
    if (e.residual != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = m + j % 2, channel = n + j / 2 * 8;
        if (!schedule.Has(share_.batch, row) || channel >= part.n) continue;
        const int64_t out_row = schedule.Row(share_.batch, row);
        const int64_t at = p_.apply_lhs_scale ? out_row : out_row * part.n + channel;
        addends.residual[j] = LoadBits(e.residual, e.residual_float, at);
      }
    }
    return addends;
  }

  // The first row and the first channel of this lane, in a tile of rows and in a slice that this CTA stores.
  __device__ int Row(int tile) const { return tile * 8 + Opaque(threadIdx.x) % 4 * 2; }
  __device__ int Channel(int tile_slice, int slice) const {
    const int first = tile_slice + Rank() * owned_;
    return ((p_.epilogue.gated ? first / 2 : first) + slice) * kSliceRows +
           Opaque(threadIdx.x) % 32 / 4;
  }

  // Fragments of 8 rows and 16 channels that this CTA stores; in a gated product each is a pair of slices.
  __device__ int Fragments(int slices) const {
    const int owned = Owned(slices);
    return (p_.epilogue.gated ? owned / 2 : owned) * I::kTiles;
  }

  // Slices that this CTA owns of a tile of `slices`.
  __device__ int Owned(int slices) const { return max(0, min(owned_, slices - Rank() * owned_)); }

  // Whether the warps of a cluster of one CTA exchange partial sums by plain stores and a named barrier.
  __device__ bool UsesPlainStores() const { return kForSanitizer && p_.plan.cluster_shift == 0; }

  // In the cluster.
  __device__ static int Rank() { return Opaque(ClusterRank()); }

  // The address of this lane's part of a fragment.
  __device__ uint32_t Fragment(int slice, int sender, int tile) const {
    return memory_.partials(p_.plan, Buffer()) +
           ((slice * senders_ + sender) * I::kTiles + tile) * kFragmentBytes +
           threadIdx.x % 32 * 16;
  }

  // The destination of this lane's values of a fragment: two channels, eight apart, of two rows.
  struct Target {
    uint64_t rows[2];  // addresses of the first channel
    uint32_t has;      // bit j: there is a row and a channel of value j
    uint32_t is_float;

    // Makes the compiler compute the values here instead of at their use.
    __device__ void Pin() {
      asm volatile("" : "+l"(rows[0]), "+l"(rows[1]), "+r"(has), "+r"(is_float));
    }
    __device__ void Store(const float (&values)[4]) const {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((has >> j & 1) == 0) continue;
        if (is_float != 0) {
          reinterpret_cast<float*>(rows[j % 2])[j / 2 * 8] = values[j];
        } else {
          reinterpret_cast<typename I::T*>(rows[j % 2])[j / 2 * 8] = typename I::T(values[j]);
        }
      }
    }
  };
  __device__ Target TargetOf(int tile_slice, int fragment) const {
    const Product& part = p_.products[OwnProduct(p_)];
    const int m = Row(fragment % I::kTiles), n = Channel(tile_slice, fragment / I::kTiles);
    const auto schedule = ScheduleOf<I>(p_, share_);
    const int size = p_.out_float ? sizeof(float) : sizeof(typename I::T);
    Target target = {{}, 0, p_.out_float};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      target.rows[i] = reinterpret_cast<uint64_t>(part.out) +
                       (schedule.Row(share_.batch, m + i) * part.n + n) * size;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool has = schedule.Has(share_.batch, m + j % 2) && n + j / 2 * 8 < part.n;
      target.has |= static_cast<uint32_t>(has) << j;
    }
    return target;
  }

  __device__ bool Sends() const { return I::kDivided && p_.sends; }

  // The row of a tile that this lane sends.
  __device__ static int SentRow(int tile) {
    const int lane = Opaque(threadIdx.x) % 32;
    return tile * 8 + lane % 4 * 2 + lane / 4 % 2;
  }

  // The number of exchanges so far of the row of a tile that this lane sends.
  __device__ const uint32_t* CountedRounds(int tile) const {
    return p_.inboxes.rounds + min(SentRow(tile), p_.m - 1) * kMaxExchangeWarps;
  }

  // Sends a fragment to all devices. Four lanes with the same rows transpose their channels, so that each has four
  // consecutive ones of a row. `n`: this lane's first channel.
  __device__ void Send(int tile, int n, float (&sum)[4]) const {
    const int group = Opaque(threadIdx.x) % 32 / 4;  // of channels
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool odd = group >> i & 1;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >> i & 1) continue;
        float& low = sum[j];
        float& high = sum[j + (1 << i)];
        const float received = __shfl_xor_sync(~0u, odd ? low : high, 4 << i);
        (odd ? low : high) = received;
      }
    }
    const int row = SentRow(tile), column = n - group % 4 + group % 4 / 2 * 8;
    if (row >= p_.m || column >= p_.products[0].n) return;
    const uint4 piece = {BitsToSend(sum[0]), BitsToSend(sum[1]), BitsToSend(sum[2]),
                         BitsToSend(sum[3])};
    const Inboxes& to = p_.inboxes;
    const uint32_t round = *CountedRounds(tile) + 1;
    const int place = InboxRow(to, row, round, to.rank) + column / kPieceColumns;
    SendPiece(to, place, piece);
    StoreToSystem(static_cast<uint4*>(to.of[to.rank]) + place, piece);
  }

  const Params& p_;
  const Share& share_;
  const Memory memory_;
  const int number_;
  const int owned_;    // maximum slices of a tile per CTA
  const int senders_;  // of partial sums for a slice
};

}  // namespace jaxlowbit::sm90_stream
