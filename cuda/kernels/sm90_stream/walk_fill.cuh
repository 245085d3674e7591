// SPDX-License-Identifier: Apache-2.0
//
// The walk's producer warp: pages of weights and scales of all steps of all layers, in the order of the consumers. It
// waits only for free slots of the ring, and for the arrival of earlier pages: more in flight is slower.
#pragma once

#include "cuda/kernels/sm90_stream/walk_params.cuh"

namespace jaxlowbit::sm90_stream::walk {

template <class I>
class PageFiller {
 public:
  __device__ PageFiller(const Params& p, Memory memory)
      : p_(p),
        memory_(memory),
        policy_(EvictFirst()),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(ClusterRank()),
        watch_(p) {}

  __device__ void FillAll() {
    Turned turned(p_);
#pragma unroll 1
    for (int layer = 0; layer < p_.layers; ++layer) {
#pragma unroll 1
      for (int step = 0; step < kWalkSteps; ++step, turned.Next()) {
        step_ = layer * kWalkSteps + step;
        const Units units(p_, step, turned.value());
        PrefetchNorm(units.product, layer);
        const int count = units.count();
#pragma unroll 1
        for (int i = 0; i < count; ++i) FillUnit(units, units.At(i), layer);
      }
    }
    if (watch_.stopped()) Sleep(500000);  // copies may be in flight
  }

 private:
  // Weights of the norm in device memory would be waited for.
  __device__ void PrefetchNorm(const Product& product, int layer) const {
    if (product.norm == nullptr || lane_ != 0) return;
    const int bytes = product.atoms * 64 * (product.wide_norm ? 4 : 2);
    PrefetchToL2(product.norm + layer * product.norm_stride + rank_ * bytes, bytes);
  }

  // Loads the pages of a unit: of the gate's and up's strip in turn, or one strip after the other.
  __device__ void FillUnit(const Units& units, const Unit& unit, int layer) {
    const Product& product = units.product;
    const bool whole = unit.half < 0;
    const int atoms = product.atoms, page_atoms = PageAtoms(whole);
    const Part& own = product.PartOf(unit.strip);
    const int64_t atom = int64_t{unit.strip - own.first} * 2 * atoms + rank_ * atoms;
    const uint8_t* packed = own.packed + layer * product.packed_stride + atom * kAtomBytes<4>;
    const uint8_t* scales =
        own.scales + layer * product.scale_stride + atom / kGroupAtoms * kGroupScaleBytes;
    const int scale_bytes = page_atoms / kGroupAtoms * kGroupScaleBytes;
    // Each lane's copy of every page.
    const int packed_lanes = whole ? 1 : page_atoms;
    const int part = whole ? kPackedBytes : kPackedBytes / 16;
    const bool copies_packed = lane_ < packed_lanes, copies_scales = lane_ == packed_lanes;
    const uint8_t* source = copies_scales ? scales
                            : whole       ? packed
                                          : packed + lane_ * kAtomBytes<4> + unit.half * part;
    const int target = copies_scales ? kPackedBytes : lane_ * part;
    const int bytes = copies_packed ? part : copies_scales ? scale_bytes : 0;
    const int stride = copies_scales ? scale_bytes : page_atoms * kAtomBytes<4>;
    const int64_t up = int64_t{product.second} * 2 * atoms *
                       (copies_scales ? kGroupScaleBytes / kGroupAtoms : kAtomBytes<4>);
    const int pages = PagesOf(atoms, whole), strips = units.strips();
    const int together = I::kSplitsPairs ? strips : 1;
#pragma unroll 1
    for (int first = 0; first < strips; first += together, source += up) {
      const uint8_t* from = source;
#pragma unroll 1
      for (int page = 0; page < pages; ++page, from += stride) {
#pragma unroll 1
        for (int i = 0; i < together; ++i) {
          FillPage(i == 0 ? from : from + up, target, bytes, kPackedBytes + scale_bytes);
        }
      }
    }
  }

  __device__ void FillPage(const uint8_t* source, int target, int bytes, int all_bytes) {
    watch_.Barrier(kForSlot, step_, memory_.empty(cursor_.slot), cursor_.parity);
    if (++filled_ > p_.flight) {
      watch_.Barrier(kForFlight, step_, memory_.full(arriving_.slot), arriving_.parity);
      arriving_.Advance(p_.pages);
    }
    const uint32_t barrier = memory_.full(cursor_.slot);
    if (watch_.stopped()) return;
    if (!p_.loads) {
      if (lane_ == 0) Arrive(barrier);
    } else {
      if (lane_ == 0) ArriveExpecting(barrier, all_bytes);
      __syncwarp();
      if (bytes > 0) {
        BulkLoad(memory_.base + p_.ring_at + cursor_.slot * kPageBytes + target, source, bytes,
                 barrier, policy_);
      }
    }
    cursor_.Advance(p_.pages);
  }

  const Params& p_;
  const Memory memory_;
  const uint64_t policy_;
  const int lane_, rank_;
  Watch watch_;
  RingCursor cursor_ = {0, 1}, arriving_ = {0, 0};
  int filled_ = 0, step_ = 0;
};

}  // namespace jaxlowbit::sm90_stream::walk
