// SPDX-License-Identifier: Apache-2.0
//
// The walk's consumer warps: pages to partial sums, which they send to the collectors of both CTAs.
#pragma once

#include "cuda/device/mma.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/kernels/sm90_stream/walk_rows.cuh"

namespace jaxlowbit::sm90_stream::walk {

// Partial sums of a warp: two slices, in the order of operand D. Only lanes 0, 4, 8, ... have columns 0 and 1, the rows of
// lhs.
using Sums = float[kSlicesPerWarp][4];

// A warp's part of the pages of a unit: two slices of one group.
template <class I>
class PageMultiplier {
 public:
  // `warp`: of 8.
  __device__ PageMultiplier(int warp, int lane, const Unit& unit) {
    const bool whole = unit.half < 0;
    const int group = whole ? warp / 2 : warp, slice = whole ? warp % 2 * 2 : 0;
    atom_bytes_ = (whole ? 4 : 2) * kSliceAtomBytes;
    packed_ = group * kGroupAtoms * atom_bytes_ + slice * kSliceAtomBytes + lane * 16;
    const int channel = (whole ? slice : 2 * unit.half) * kSliceRows + lane / 4 * 2;
    scales_ = kPackedBytes + group * kGroupScaleBytes + channel * 2;
    const int row = min(lane % 8, I::kRows - 1);
    lhs_ = group * kGroupAtoms * kAtomLhs + row * kLhsBytes + (lane / 8 ^ row) * kCopyBytes;
    page_lhs_ = (whole ? 8 : 16) * kAtomLhs;
  }

  // Bytes of lhs between pages.
  __device__ int page_lhs() const { return page_lhs_; }

  __device__ void Multiply(uint32_t page, uint32_t lhs, Sums& sums) const {
    IntegerRowPair<T, T, 4> rows[kSlicesPerWarp];
    uint32_t packed[kGroupAtoms][kSlicesPerWarp][4];
    float part[kGroupAtoms][kSlicesPerWarp][4] = {};
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      rows[i].Start(false);
      rows[i].LoadScales(page + scales_ + i * kSliceRows * 2);
#pragma unroll
      for (int a = 0; a < kGroupAtoms; ++a) {
        const uint32_t at = page + packed_ + a * atom_bytes_ + i * kSliceAtomBytes;
        LoadPacked<4>(at, 0, 0, 0, packed[a][i]);
      }
    }
    uint32_t fragments[kGroupAtoms][4];
#pragma unroll
    for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
      for (int a = 0; a < kGroupAtoms; ++a) {
        // One load is two steps of two chunks of 8 columns; the swizzle XORs chunks.
        if (step % 2 == 0) {
          LoadMatrices(fragments[a], (lhs + lhs_ + a * kAtomLhs) ^ (step * 2 * kCopyBytes));
        }
#pragma unroll
        for (int i = 0; i < kSlicesPerWarp; ++i) {
          uint32_t weights[4];
          rows[i].Dequantize(packed[a][i], step, weights);
          Mma<T>(part[a][i], weights, fragments[a][step % 2 * 2], fragments[a][step % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kGroupAtoms; ++a) {
#pragma unroll
      for (int i = 0; i < kSlicesPerWarp; ++i) rows[i].AddScaled(part[a][i], sums[i]);
    }
  }

 private:
  static constexpr int kAtomLhs = I::kRows * kLhsBytes;

  int packed_, scales_, lhs_, atom_bytes_, page_lhs_;
};

template <class I>
class Consumer {
 public:
  __device__ Consumer(const Params& p, Memory memory)
      : p_(p), memory_(memory), lane_(static_cast<int>(threadIdx.x) % 32), watch_(p) {
    cursor_.Advance(Warp() / 8, p.pages);
  }

  __device__ void MultiplyAll() {
    WaitForPreviousKernels();
    for (int layer = 0; layer < p_.layers; ++layer) {
      for (int step = 0; step < kWalkSteps; ++step) {
        const Units units(p_, layer, step);
        if (units.count() == 0) continue;
        number_ = layer * kWalkSteps + step;
        first_page_ = true;
        if (threadIdx.x == 0) StampStart();
        RowLoader<I>(p_, memory_, layer, step, watch_).Load();
        if (threadIdx.x == 0) StampThere();
        for (int i = 0; i < units.count(); ++i) MultiplyUnit(units, units.At(i));
        if (threadIdx.x == 0) Stamp<I>(p_, number_, kStampDone, TimeOf());
      }
    }
  }

 private:
  __device__ void MultiplyUnit(const Units& units, const Unit& unit) {
    const PageMultiplier<I> multiplier(Warp() % 8, lane_, unit);
    const int pages = units.Pages(unit) / I::kGroups;  // of a group of warps
    for (int strip = 0; strip < units.strips(); ++strip) {
      Sums sums = {};
      uint32_t lhs = memory_.base + p_.lhs_at + Warp() / 8 * multiplier.page_lhs();
#pragma unroll 1
      for (int page = 0; page < pages; ++page) {
        watch_.Barrier(kForPage, number_, memory_.full(cursor_.slot), cursor_.parity);
        if (I::kStamps && first_page_ && threadIdx.x == 0) {
          Stamp<I>(p_, number_, kStampPage, TimeOf());
          first_page_ = false;
        }
        multiplier.Multiply(memory_.base + p_.ring_at + cursor_.slot * kPageBytes, lhs, sums);
        __syncwarp();  // every lane has read the page
        if (lane_ == 0 && !watch_.stopped()) Arrive(memory_.empty(cursor_.slot));
        cursor_.Advance(I::kGroups, p_.pages);
        lhs += I::kGroups * multiplier.page_lhs();
      }
      if (strip == 0 && units_ >= 2) {
        watch_.Barrier(kForPartialsFree, number_, memory_.partials_free(units_ % 2),
                       (units_ / 2 - 1) % 2);
      }
      Send(unit, strip, sums);
    }
    ++units_;
  }

  // Sends sums to the CTA that collects their channels: of whole strips rank r collects slices 2 r and 2 r + 1, of a half
  // its slice r.
  __device__ void Send(const Unit& unit, int strip, const Sums& sums) const {
    if (lane_ % 4 != 0 || watch_.stopped()) return;
    const bool whole = unit.half < 0;
    const int warp = Warp() % 8, group = Opaque(ClusterRank()) * I::kGroups + Warp() / 8;
    const int sender = whole ? group * 4 + warp / 2 : group * 8 + warp;
    const uint32_t at = PartialsAt<I>(p_, memory_, units_ % 2, strip) + lane_ / 4 * 16 +
                        sender * (whole ? 2 * kFragmentBytes : kFragmentBytes);
    const uint32_t barrier = memory_.partials_full(units_ % 2);
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      const int to = whole ? warp % 2 : i;
      StoreRemote(MapToRank(at + (whole ? i * kFragmentBytes : 0), to), sums[i],
                  MapToRank(barrier, to));
    }
  }

  // Recomputed at each use, so that it needs no register in the loop over pages.
  __device__ static int Warp() { return Opaque(static_cast<int>(threadIdx.x)) / 32; }

  __device__ uint64_t TimeOf() const { return I::kStamps ? Clock() : 0; }

  __device__ void StampStart() {
    if constexpr (I::kStamps) {
      landed_ = Landed();
      Stamp<I>(p_, number_, kStampStart, Clock());
    }
  }
  __device__ void StampThere() {
    if constexpr (I::kStamps) {
      Stamp<I>(p_, number_, kStampThere, Clock());
      Stamp<I>(p_, number_, kStampLanded, static_cast<uint64_t>(Landed()) << 32 | landed_);
    }
  }
  // Pages that have arrived and wait to be multiplied.
  __device__ int Landed() const {
    RingCursor cursor = cursor_;
    int count = 0;
    while (count < p_.pages && HasEnded(memory_.full(cursor.slot), cursor.parity)) {
      cursor.Advance(p_.pages);
      ++count;
    }
    return count;
  }

 public:
  static constexpr int kFragmentBytes = 8 * 16;  // of a slice: 16 channels of two rows

 private:
  const Params& p_;
  const Memory memory_;
  const int lane_;
  Watch watch_;
  RingCursor cursor_ = {0, 0};
  int units_ = 0;  // multiplied before
  int number_ = 0;
  bool first_page_ = false;
  int landed_ = 0;
};

}  // namespace jaxlowbit::sm90_stream::walk
