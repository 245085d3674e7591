// SPDX-License-Identifier: Apache-2.0
//
// Shared by all parts of the walk: parameters, the units of a cluster, the layout of shared memory, waits that end.
#pragma once

#include <cuda_bf16.h>

#include "cuda/device/barrier.cuh"
#include "cuda/device/bulk.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/kernels/sm90_stream/plan.h"
#include "cuda/kernels/sm90_stream/walk.h"
#include "cuda/kernels/sm90_stream/walk_memory.cuh"

namespace jaxlowbit::sm90_stream::walk {

using T = __nv_bfloat16;

// A page: 16 slices by groups of 128 columns, then the scales of their strip. Of a whole strip it has 4 groups, of half a
// strip 8; each of 8 warps multiplies 2 slices of one group.
inline constexpr int kPackedBytes = 16 * 1024;
inline constexpr int kGroupAtoms = 2;
inline constexpr int kGroupScaleBytes = 64 * 2;  // of a strip
inline constexpr int kPageBytes = kPackedBytes + 8 * kGroupScaleBytes;
inline constexpr int kSliceAtomBytes = kAtomBytes<4> / kSlicesPerStrip;
inline constexpr int kLhsBytes = 64 * 2;  // of an atom and a row
inline constexpr int kMaxPages = 16;
inline constexpr int kBarrierArea = 640;
inline constexpr int kHelperWarps =
    4;  // the producer, the collector, and two that fill their warpgroup

// An instance: groups of 8 consumer warps, rows of activations, whether to record times.
template <int kGroupsOfWarps, int kRowsOfLhs, bool kRecords>
struct Instance {
  static constexpr int kGroups = kGroupsOfWarps, kRows = kRowsOfLhs;
  static constexpr bool kStamps = kRecords;
  static constexpr int kConsumers = 8 * kGroups;  // warps
  static constexpr int kConsumerThreads = 32 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 32 * kHelperWarps;
  // 640 threads have 96 registers each, of which helpers pass 32 on.
  static constexpr bool kPassesRegisters = kGroups == 2;
  static constexpr int kHelperRegisters = 64, kConsumerRegisters = 104;
  // Vectors of four columns that a thread normalizes: of each half of a row.
  static constexpr int kVectors = kGroups == 1 && kRows == 1 ? 4 : 2;
  // Two groups of warps take turns: with the strips of gate and up, or with the pages of a strip.
  static constexpr bool kSplitsPairs = kGroups == 2;
};

// Partial sums that a CTA receives from a group of warps for a strip or for half of one; two such parts are a buffer.
inline constexpr int kPartBytes = 2048;

// The most weights side by side in a step: q, k and v.
inline constexpr int kMaxParts = 3;

// One of the weights of a step, or a pair of gate and up.
struct Part {
  const uint8_t *packed, *scales;
  T* out;     // null, or rows of every layer
  int first;  // strip of the step
  int row;    // pairs of columns of a row of out
};

// The product of a step. Strides are of a layer.
struct Product {
  Part parts[kMaxParts];
  int64_t packed_stride, scale_stride;
  const uint8_t* norm;  // null: none
  bool wide_norm;       // float32
  int64_t norm_stride;
  const T* plain_lhs;  // null, or rows that earlier kernels wrote, instead of entries
  const uint64_t* lhs;
  int lhs_row;    // entries between rows
  int lhs_epoch;  // 0 or -1: relative to the layer's
  const uint64_t* lhs_count;
  int lhs_arrivals;                // of a layer
  const uint32_t* plain_residual;  // null, or rows that earlier kernels wrote, in pairs of columns
  const uint64_t* residual;  // null: none; of the epoch residual_epoch, relative to the layer's
  int residual_epoch;
  uint64_t *out, *count;  // null: only rows
  int out_row;            // entries of a row
  int atoms;              // along k, of a CTA
  int second;             // strips between the gate's strip and up's; 0: not gated
  WalkUnits units;

  __device__ const Part& PartOf(int strip) const {
    return parts[(strip >= parts[1].first ? 1 : 0) + (strip >= parts[2].first ? 1 : 0)];
  }
};

struct Params {
  Product products[kWalkSteps];
  int layers, clusters, pages, flight, slack, sleep;
  int turn;  // clusters between those with one more unit in two steps
  bool loads, waits;
  uint32_t epoch, patience;  // patience: in 2^20 ns
  float mean_factor;         // 1 / columns of a normalized row
  float epsilon;
  unsigned long long *error, *stamps;  // null error: a wait that lasts too long ends the context
  int lhs_at, partials_at, ring_at;    // in shared memory
};

// A unit of a cluster.
struct Unit {
  int strip;
  int half;  // -1: both
};

// The units of a cluster in a step. The clusters with one more unit change from step to step.
struct Units {
  const Product& product;
  int cluster, clusters, turned;

  // `turned`: of Turned.
  __device__ Units(const Params& p, int step, int turned)
      : product(p.products[step]),
        cluster(static_cast<int>(blockIdx.x) / 2),
        clusters(p.clusters),
        turned(turned) {}

  __device__ int count() const {
    return product.units.base + (turned < product.units.extra ? 1 : 0);
  }
  __device__ Unit At(int i) const {
    const int whole = product.units.base;
    if (i < whole) return {i * clusters + cluster, -1};
    if (!product.units.cut) return {whole * clusters + turned, -1};
    return {whole * clusters + turned / 2, turned % 2};
  }
  __device__ int strips() const { return product.second > 0 ? 2 : 1; }  // of a unit
};

// Of a strip or a half of one. Shifts, since a division takes longer than a wait.
__device__ inline int PageAtoms(bool whole) { return whole ? 8 : 16; }
__device__ inline int PagesOf(int atoms, bool whole) { return atoms >> (whole ? 3 : 4); }

// A cluster's place among those with one more unit, which changes from step to step.
class Turned {
 public:
  __device__ explicit Turned(const Params& p)
      : clusters_(p.clusters), turn_(p.turn), turned_(static_cast<int>(blockIdx.x) / 2) {}
  __device__ int value() const { return turned_; }
  __device__ void Next() {
    turned_ += turn_;
    if (turned_ >= clusters_) turned_ -= clusters_;
  }

 private:
  const int clusters_, turn_;
  int turned_;
};

struct Memory {
  uint32_t base;

  // A page has arrived, or has been read.
  __device__ uint32_t full(int slot) const { return base + slot * kBarrierBytes; }
  __device__ uint32_t empty(int slot) const { return base + (kMaxPages + slot) * kBarrierBytes; }
  // All partial sums of a unit have arrived, or both CTAs have read theirs.
  __device__ uint32_t partials_full(int buffer) const {
    return base + (2 * kMaxPages + buffer) * kBarrierBytes;
  }
  __device__ uint32_t partials_free(int buffer) const {
    return base + (2 * kMaxPages + 2 + buffer) * kBarrierBytes;
  }
  // Sums of squares of a row, of all warps.
  __device__ uint32_t squares(int row) const {
    return base + (2 * kMaxPages + 4) * kBarrierBytes + row * 16 * 4;
  }
  __device__ uint32_t step(int number) const { return squares(2) + number * kStepBytes; }

  static constexpr int kStepBytes = 48;
};
static_assert((2 * kMaxPages + 4) * kBarrierBytes + 2 * 16 * 4 + kWalkSteps * Memory::kStepBytes <=
              kBarrierArea);

// What consumers must know of a step, in shared memory: constants of an indexed product take longer.
struct StepInfo {
  const uint8_t *lhs, *norm;  // of this CTA's half; no norm: null; plain or entries
  uint32_t norm_stride, lhs_row_bytes;
  int lhs_epoch, atoms;
  WalkUnits units;
  bool gated, plain, wide_norm;

  __device__ int vectors() const { return atoms * 16; }  // of four columns of a row's half

  static __device__ void Store(const Product& product, uint32_t to) {
    const int vectors = product.atoms * 16, first = ClusterRank() * vectors;
    const bool plain = product.plain_lhs != nullptr;
    const auto lhs = plain ? reinterpret_cast<uint64_t>(product.plain_lhs + first * 4)
                           : reinterpret_cast<uint64_t>(product.lhs + first * 2);
    const auto norm =
        product.norm == nullptr
            ? 0
            : reinterpret_cast<uint64_t>(product.norm + first * (product.wide_norm ? 16 : 8));
    StoreShared16(to, uint4{static_cast<uint32_t>(lhs), static_cast<uint32_t>(lhs >> 32),
                            static_cast<uint32_t>(norm), static_cast<uint32_t>(norm >> 32)});
    StoreShared16(to + 16, uint4{static_cast<uint32_t>(product.norm_stride),
                                 static_cast<uint32_t>(plain ? vectors * 16 : product.lhs_row * 8),
                                 static_cast<uint32_t>(product.lhs_epoch),
                                 static_cast<uint32_t>(product.atoms)});
    StoreShared16(to + 32, uint4{static_cast<uint32_t>(product.units.base),
                                 static_cast<uint32_t>(product.units.extra), product.units.cut,
                                 (product.second > 0 ? 1u : 0) | (plain ? 2u : 0) |
                                     (product.wide_norm ? 4u : 0)});
  }
  static __device__ StepInfo Load(uint32_t from) {
    const uint4 a = LoadShared16(from), b = LoadShared16(from + 16), c = LoadShared16(from + 32);
    StepInfo info;
    info.lhs = reinterpret_cast<const uint8_t*>(static_cast<uint64_t>(a.y) << 32 | a.x);
    info.norm = reinterpret_cast<const uint8_t*>(static_cast<uint64_t>(a.w) << 32 | a.z);
    info.norm_stride = b.x, info.lhs_row_bytes = b.y;
    info.lhs_epoch = static_cast<int>(b.z), info.atoms = static_cast<int>(b.w);
    info.units = {static_cast<int>(c.x), static_cast<int>(c.y), c.z != 0};
    info.gated = (c.w & 1) != 0, info.plain = (c.w & 2) != 0, info.wide_norm = (c.w & 4) != 0;
    return info;
  }
};

__device__ inline uint32_t PartialsAt(const Params& p, Memory memory, int buffer, int strip) {
  return memory.base + p.partials_at + (buffer * 2 + strip) * kPartBytes;
}

enum What {
  kForSlot = 1,
  kForFlight,
  kForPage,
  kForPartialsFree,
  kForRows,
  kForCount,
  kForPartials,
  kForResidual
};

inline constexpr uint32_t kPollsBetweenChecks = 64, kStop = ~0u;

// Called at some polls of a wait: kStop if it must end, else when it started. `word`: of the error. Not inlined, since
// it would be most of the code of a wait.
__device__ __noinline__ inline uint32_t CheckWait(unsigned long long* error, uint32_t patience,
                                                  uint32_t word, uint32_t polls, uint32_t start) {
  const auto now = static_cast<uint32_t>(Nanoseconds() >> 20);
  if (polls == kPollsBetweenChecks) start = now;
  if (error != nullptr && LoadRelaxed(error) != 0) return kStop;
  if (now - start <= patience) return start;
  if (error == nullptr) __trap();
  StoreRelaxed(error, static_cast<uint64_t>(blockIdx.x) << 32 | word);
  return kStop;
}

// Ends waits after Params::patience. Afterwards no wait of the thread lasts, so that the kernel soon ends.
class Watch {
 public:
  __device__ explicit Watch(const Params& p) : p_(p) {}

  __device__ bool stopped() const { return stopped_; }

  // Polls until `poll` returns true. `what`, `step`: for the error.
  template <class Poll>
  __device__ void Until(What what, int step, const Poll& poll) {
    uint32_t polls = 0, start = 0;
#pragma unroll 1
    while (!stopped_ && !poll()) {
      if (++polls % kPollsBetweenChecks != 0) continue;
      start =
          CheckWait(p_.error, p_.patience,
                    static_cast<uint32_t>(step) << 8 | static_cast<uint32_t>(what), polls, start);
      stopped_ = start == kStop;
    }
  }
  __device__ void Barrier(What what, int step, uint32_t barrier, int parity) {
    Until(what, step, [=] { return TryWait(barrier, parity); });
  }

 private:
  const Params& p_;
  bool stopped_ = false;
};

template <class I>
__device__ void Stamp(const Params& p, int number, WalkStamp stamp, uint64_t value) {
  if constexpr (I::kStamps) {
    const int64_t place = int64_t{blockIdx.x} * (p.layers * kWalkSteps + 2) + number;
    p.stamps[place * kWalkStamps + stamp] = value;
  }
}

// Records the clock, by the first thread of those that call this.
template <class I>
__device__ void StampNow(const Params& p, int number, WalkStamp stamp) {
  if constexpr (I::kStamps) {
    if (threadIdx.x % I::kConsumerThreads == 0) Stamp<I>(p, number, stamp, Clock());
  }
}

}  // namespace jaxlowbit::sm90_stream::walk
