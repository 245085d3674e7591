// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to sums, of up to 8 tokens: what a warp does with its two slices of channels and its atoms of
// a stage. Fragments of lhs by ldmatrix, codes to weights in registers, mma.
#pragma once

#include <type_traits>

#include "cuda/device/mma.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/qmm_sm90_stream/params.cuh"

namespace jaxlowbit::qmm_sm90_stream {

template <class I>
using Sums = float[kSlicesPerWarp][I::kTiles * 4];

template <class I>
using Rows =
    std::conditional_t<I::kScaleSums, IntegerRowPair<typename I::T, typename I::S, I::kBits>,
                       ScaledRowPair<typename I::T, typename I::S, I::kBits>>;

// The same weights in fewer instructions, in groups of 32 and more whose scales allow it.
template <class I>
using FastestRows = std::conditional_t<!I::kScaleSums && I::kZero != ZeroKind::kInteger &&
                                           std::is_same_v<typename I::T, __nv_bfloat16> &&
                                           std::is_same_v<typename I::S, __nv_bfloat16>,
                                       FusedRowPair<typename I::T, I::kBits>, Rows<I>>;

template <class I>
class StageMultiplier {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  // `part`: of a stage's atoms, that of this warp.
  __device__ StageMultiplier(const Params& p, int part, int lane)
      : p_(p), atom_(Keep(part * p.plan.warp_atoms)), lane_(lane) {
    // Lane i reads row i % 8 of matrix i / 8: half i / 8 % 2 of step i / 16.
    const int row = I::kGathers ? min(lane_ % 8, p_.m - 1) : lane_ % 8;
    lhs_ = Keep(atom_ * LhsBytes() + row * kRowBytes + (lane_ / 8 ^ row % 8) * kCopyBytes);
  }

  // A tile; `own`: the first of the warp's two slices in it, in the order of TileSlice.
  __device__ void StartTile(int own, int) {
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      const int slice = TileSlice<I>(p_, own + i), strip = slice / kSlicesPerStrip;
      codes_[i] = Keep(p_.plan.bytes.lhs + (strip << p_.plan.stage_shift) * kAtomBytes<kBits> +
                       atom_ * kAtomBytes<kBits> + slice % kSlicesPerStrip * I::kSliceBytes +
                       lane_ * (I::kSliceBytes / 32));
      const int group = strip * p_.plan.stage_groups + FirstGroup(p_, atom_);
      const int row = group * kRows + slice % kSlicesPerStrip * kSliceRows + lane_ / 4 * 2;
      scales_[i] =
          Keep(p_.plan.bytes.lhs + p_.plan.bytes.codes + row * static_cast<int>(sizeof(S)));
    }
  }

  // Of activations and an atom.
  __device__ int LhsBytes() const { return (I::kGathers ? p_.m : 8) * kRowBytes; }

  // This warp's atoms of a stage and its activations, with which `left` atoms are left along k.
  __device__ void Multiply(uint32_t stage, uint32_t activations, int left, Sums<I>& sums) const {
    const int own = min(p_.plan.warp_atoms, left - atom_);
    if (kTogetherAtoms == 2 && own == 2 && p_.atom_step == 0 && TakeFastest<1>(stage, 0)) {
      MultiplyAtoms<FastestRows<I>, 2, 1>(stage, activations, 0, sums);
      return;
    }
#pragma unroll 1
    for (int at = 0; at < own; ++at) {
      if (p_.groups_per_atom == 1 && TakeFastest<1>(stage, at)) {
        MultiplyAtoms<FastestRows<I>, 1, 1>(stage, activations, at, sums);
      } else if (p_.groups_per_atom == 2 && TakeFastest<2>(stage, at)) {
        MultiplyAtoms<FastestRows<I>, 1, 2>(stage, activations, at, sums);
      } else {
        MultiplyAtoms<Rows<I>, 1, 0>(stage, activations, at, sums);
      }
    }
  }

 private:
  static constexpr int kRows = kAtom;  // of a group
  // What a warp multiplies at a time, so that instructions overlap: two atoms, if registers allow.
  static constexpr int kTogetherAtoms = kBits == 4 ? 2 : 1;

  // Whether FastestRows take the scales of both slices in the kGroups groups of the warp's atom `at`.
  template <int kGroups>
  __device__ bool TakeFastest(uint32_t stage, int at) const {
    if constexpr (std::is_same_v<FastestRows<I>, Rows<I>>) {
      return true;
    } else {
      bool take = true;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kSlicesPerWarp; ++i) {
          take &= FastestRows<I>::Takes(ScaleAddress(stage, i, at * p_.atom_step + group * kRows));
        }
      }
      return __all_sync(~0u, take);
    }
  }

  // kAtoms of the warp's atoms, from number `at` on, in kGroups groups; if that is 0, one atom in as many as
  // it has.
  template <class R, int kAtoms, int kGroups>
  __device__ void MultiplyAtoms(uint32_t stage, uint32_t activations, int at, Sums<I>& sums) const {
    static_assert(kAtoms == 1 || kGroups == 1);
    const int groups = kGroups == 0 ? p_.groups_per_atom : kGroups;
    const uint32_t lhs = activations + lhs_ + at * LhsBytes();
    R rows[kSlicesPerWarp];
    uint32_t codes[kAtoms][kSlicesPerWarp][kStepsPerAtom][kWordsPerStep<kBits>];
    // Every atom has sums of its own: more products that do not wait for each other.
    float part[kAtoms][kSlicesPerWarp][4] = {};
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      rows[i].Start(I::kZero == ZeroKind::kFloat);
      LoadRows(stage, i, at * p_.atom_step, rows[i]);
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        LoadCodes<kBits>(stage + codes_[i] + (at + a) * kAtomBytes<kBits>, lane_, codes[a][i]);
      }
    }
    uint32_t fragments[kAtoms][4];  // of two steps
#pragma unroll
    for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        if (kGroups != 1 && step > 0 && step * groups % kStepsPerAtom == 0) {
          const int group = step * groups / kStepsPerAtom;  // of the atom
#pragma unroll
          for (int i = 0; i < kSlicesPerWarp; ++i) {
            AddPart(rows[i], part[0][i], sums[i]);
            LoadRows(stage, i, at * p_.atom_step + group * kRows, rows[i]);
          }
        }
        // A step is two columns, and the permutation is an exclusive or of column numbers.
        if (step % 2 == 0) {
          LoadMatrices(fragments[a], (lhs + a * LhsBytes()) ^ (step * 2 * kCopyBytes));
        }
#pragma unroll
        for (int i = 0; i < kSlicesPerWarp; ++i) {
          uint32_t weights[4];
          rows[i].Dequantize(codes[a][i][step], weights);
          Mma<T>(I::kScaleSums ? part[a][i] : sums[i], weights, fragments[a][step % 2 * 2],
                 fragments[a][step % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
#pragma unroll
      for (int i = 0; i < kSlicesPerWarp; ++i) AddPart(rows[i], part[a][i], sums[i]);
    }
  }

  // Adds what a group has summed, and begins with zeros.
  template <class R>
  __device__ static void AddPart(const R& rows, float (&part)[4], float (&sums)[4]) {
    if constexpr (I::kScaleSums) {
      rows.AddScaled(part, sums);
#pragma unroll
      for (int j = 0; j < 4; ++j) part[j] = 0;
    }
  }

  // `on`: from the rows of the warp's first group.
  template <class R>
  __device__ void LoadRows(uint32_t stage, int slice, int on, R& rows) const {
    const uint32_t scales = ScaleAddress(stage, slice, on);
    rows.LoadScales(scales);
    if constexpr (I::kZero == ZeroKind::kInteger) {
      const uint32_t beside = Keep(scales_[slice]) / sizeof(S);  // again: registers are short
      rows.LoadIntegerZeros(stage + p_.zeros_at + beside + on);
    }
    if constexpr (I::kZero == ZeroKind::kFloat) rows.LoadFloatZeros(scales + p_.plan.bytes.scales);
  }
  __device__ uint32_t ScaleAddress(uint32_t stage, int slice, int on) const {
    return stage + scales_[slice] + on * static_cast<int>(sizeof(S));
  }

  const Params& p_;
  const int atom_, lane_;  // the first atom of a stage
  // Where this lane reads in a stage, in bytes, for the warp's first atom: the activations; each slice's
  // codes and scales.
  int lhs_;
  int codes_[kSlicesPerWarp], scales_[kSlicesPerWarp];
};

}  // namespace jaxlowbit::qmm_sm90_stream
