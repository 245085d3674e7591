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
  // `warp`: of 8. `half`: of a unit.
  __device__ PageMultiplier(uint32_t warp, uint32_t lane, int half) {
    const bool whole = half < 0;
    const uint32_t group = whole ? warp / 2 : warp, slice = whole ? warp % 2 * 2 : 0;
    atom_bytes_ = (whole ? 4 : 2) * kSliceAtomBytes;
    packed_ = group * kGroupAtoms * atom_bytes_ + slice * kSliceAtomBytes + lane * 16;
    const uint32_t channel = (whole ? slice : 2 * half) * kSliceRows + lane / 4 * 2;
    scales_ = kPackedBytes + group * kGroupScaleBytes + channel * 2;
    const uint32_t row = min(lane % 8, I::kRows - 1u);
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
      : p_(p), memory_(memory), lane_(threadIdx.x % 32), rank_(Opaque(ClusterRank())), watch_(p) {
    cursor_.Advance(Warp() / 8, p.pages);
  }

  __device__ void MultiplyAll() {
    WaitForPreviousKernels();
    Turned turned(p_);
#pragma unroll 1
    for (int layer = 0; layer < p_.layers; ++layer) {
#pragma unroll 1
      for (int step = 0; step < kWalkSteps; ++step, turned.Next()) {
        const StepInfo info = StepInfo::Load(memory_.step(step));
        const int whole = info.units.base, count = whole + (turned.value() < info.units.extra);
        if (count == 0) continue;
        number_ = layer * kWalkSteps + step;
        StampNow<I>(p_, number_, kStampStart);
        RowLoader<I>(p_, memory_, info, layer, step, watch_).Load();
        StampNow<I>(p_, number_, kStampThere);
        const int last_half = info.units.cut ? (turned.value() & 1) : -1;
#pragma unroll 1
        for (unit_ = 0; unit_ < count; ++unit_) {
          MultiplyUnit(info.atoms, info.gated, unit_ < whole ? -1 : last_half);
        }
        StampNow<I>(p_, number_, kStampDone);
      }
    }
  }

 private:
  // Groups of warps take turns with pages, which are of one strip or in turn of the gate's and up's.
  __device__ void MultiplyUnit(int atoms, bool gated, int half) {
    const PageMultiplier<I> multiplier(Warp() % 8, lane_, half);
    const bool by_strip = I::kSplitsPairs && gated;
    const int turns_log = I::kGroups == 1 || by_strip ? 0 : 1;  // of groups with a strip's pages
    const int pages = PagesOf(atoms, half < 0) >> turns_log;
    const int stride = multiplier.page_lhs() << turns_log;
    const uint32_t first =
        memory_.base + p_.lhs_at + (turns_log == 0 ? 0 : Warp() / 8 * multiplier.page_lhs());
    const uint32_t strips = gated && !by_strip ? 2 : 1;
#pragma unroll 1
    for (uint32_t strip = 0; strip < strips; ++strip) {
      Sums sums = {};
      MultiplyStrip(multiplier, pages, first, stride, sums);
      if (unit_ == 0) StampNow<I>(p_, number_, kStampUnit);
      StampNow<I>(p_, number_, kStampMultiplied);
      if (strip == 0 && units_ >= 2) {
        watch_.Barrier(kForPartialsFree, number_, memory_.partials_free(units_ % 2),
                       (units_ / 2 + 1) % 2);
      }
      Send(half < 0, gated, strip, sums);
      if (unit_ == 0) StampNow<I>(p_, number_, kStampSent);
    }
    ++units_;
  }

  // Multiplies this warp's pages of a strip.
  __device__ void MultiplyStrip(const PageMultiplier<I>& multiplier, int pages, uint32_t lhs,
                                int stride, Sums& sums) {
#pragma unroll 1
    for (int page = 0; page < pages; ++page, lhs += stride) {
      watch_.Barrier(kForPage, number_, memory_.full(cursor_.slot), cursor_.parity);
      if (I::kStamps && unit_ == 0 && page == 0) StampNow<I>(p_, number_, kStampPage);
      multiplier.Multiply(memory_.base + p_.ring_at + cursor_.slot * kPageBytes, lhs, sums);
      __syncwarp();  // every lane has read the page
      if (lane_ == 0 && !watch_.stopped()) Arrive(memory_.empty(cursor_.slot));
      if (I::kStamps && unit_ == 0 && page == 0) StampNow<I>(p_, number_, kStampFirst);
      cursor_.Advance(I::kGroups, p_.pages);
    }
  }

  // Sends sums to the CTA that collects their channels: of whole strips rank r collects slices 2 r and 2 r + 1, of a
  // half its slice r. A buffer has 1 KB for each CTA and group of warps, or for each CTA and strip.
  __device__ void Send(bool whole, bool gated, uint32_t strip, const Sums& sums) const {
    if (lane_ % 4 != 0 || watch_.stopped()) return;
    const uint32_t warp = Warp() % 8, group = Warp() / 8, rank = rank_;
    const uint32_t part = !gated            ? rank * I::kGroups + group
                          : I::kSplitsPairs ? group * 2 + rank
                                            : strip * 2 + rank;
    const uint32_t at = PartialsAt(p_, memory_, units_ % 2, 0) + part * (kPartBytes / 2) +
                        (whole ? warp & ~1u : warp) * kFragmentBytes + lane_ / 4 * 16;
    const uint32_t barrier = memory_.partials_full(units_ % 2);
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      const int to = whole ? warp % 2 : i;
      StoreRemote(MapToRank(at + (whole ? i * kFragmentBytes : 0), to), sums[i],
                  MapToRank(barrier, to));
    }
  }

  // Recomputed at each use, so that it needs no register in the loop over pages.
  __device__ static uint32_t Warp() { return Opaque(static_cast<uint32_t>(threadIdx.x)) / 32; }

 public:
  static constexpr int kFragmentBytes = 8 * 16;  // of a slice: 16 channels of two rows

 private:
  const Params& p_;
  const Memory memory_;
  const uint32_t lane_, rank_;
  Watch watch_;
  RingCursor cursor_ = {0, 0};
  uint32_t units_ = 0;         // multiplied before
  int unit_ = 0, number_ = 0;  // of the step; the step
};

}  // namespace jaxlowbit::sm90_stream::walk
