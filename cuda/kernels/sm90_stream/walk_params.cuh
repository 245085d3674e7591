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
inline constexpr int kBarrierArea = 512;
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
  // Partial sums that a CTA receives for a strip or for half of one.
  static constexpr int kPartBytes = 2048 * kGroups;
};

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
  const uint8_t* plain_lhs;  // null, or rows of T that earlier kernels wrote, instead of entries
  const uint64_t* lhs;
  int lhs_row;    // entries between rows
  int lhs_epoch;  // 0 or -1: relative to the layer's
  const uint64_t* lhs_count;
  int lhs_arrivals;                // of a layer
  const uint32_t* plain_residual;  // null, or rows of T that earlier kernels wrote
  const uint64_t* residual;  // null: none; of the epoch residual_epoch, relative to the layer's
  int residual_epoch;
  uint64_t *out, *count;  // null: only rows
  int out_row;            // entries of a row
  int atoms;              // along k, of a CTA
  int columns;            // of a row of lhs
  int second;             // strips between the gate's strip and up's; 0: not gated
  WalkUnits units;

  __device__ const Part& PartOf(int strip) const {
    return parts[(strip >= parts[1].first ? 1 : 0) + (strip >= parts[2].first ? 1 : 0)];
  }
};

struct Params {
  Product products[kWalkSteps];
  int layers, clusters, pages, flight, slack, sleep;
  bool loads, waits;
  float epsilon;
  uint32_t epoch, patience;            // patience: in 2^20 ns
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

  __device__ Units(const Params& p, int layer, int step)
      : product(p.products[step]),
        cluster(static_cast<int>(blockIdx.x) / 2),
        clusters(p.clusters),
        turned((cluster + (layer * kWalkSteps + step) * 17) % p.clusters) {}

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
  __device__ int PageAtoms(const Unit& unit) const { return unit.half < 0 ? 8 : 16; }
  __device__ int Pages(const Unit& unit) const { return product.atoms / PageAtoms(unit); }
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
  // Sum of squares of a warp.
  __device__ uint32_t squares(int warp, int row) const {
    return base + (2 * kMaxPages + 4) * kBarrierBytes + (warp * 2 + row) * 4;
  }
};
static_assert((2 * kMaxPages + 4) * kBarrierBytes + 16 * 2 * 4 <= kBarrierArea);

template <class I>
__device__ uint32_t PartialsAt(const Params& p, Memory memory, int buffer, int strip) {
  return memory.base + p.partials_at + (buffer * 2 + strip) * I::kPartBytes;
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

// Ends waits after Params::patience. Afterwards no wait of the thread lasts, so that the kernel soon ends.
class Watch {
 public:
  __device__ explicit Watch(const Params& p) : p_(p) {}

  __device__ bool stopped() const { return stopped_; }

  // Polls until `poll` returns true. `what`, `step`: for the error.
  template <class Poll>
  __device__ void Until(What what, int step, const Poll& poll) {
    uint32_t polls = 0, start = 0;
    while (!stopped_ && !poll()) {
      if (++polls % kPollsBetweenChecks != 0) continue;
      const auto now = static_cast<uint32_t>(Nanoseconds() >> 20);
      if (polls == kPollsBetweenChecks) start = now;
      if (p_.error != nullptr && LoadRelaxed(p_.error) != 0) {
        stopped_ = true;
      } else if (now - start > p_.patience) {
        if (p_.error == nullptr) __trap();
        stopped_ = true;
        StoreRelaxed(p_.error, static_cast<uint64_t>(blockIdx.x) << 32 |
                                   static_cast<uint64_t>(step) << 8 | static_cast<uint64_t>(what));
      }
    }
  }
  __device__ void Barrier(What what, int step, uint32_t barrier, int parity) {
    Until(what, step, [=] { return TryWait(barrier, parity); });
  }

 private:
  static constexpr uint32_t kPollsBetweenChecks = 64;

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

}  // namespace jaxlowbit::sm90_stream::walk
