// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to sums: what a warp does with its two slices of channels and its atoms of a stage.
// Fragments of lhs by ldmatrix, codes to weights in registers, mma.
#pragma once

#include <type_traits>

#include "cuda/device/mma.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/qmm_sm90_stream/params.cuh"

namespace jaxlowbit::qmm_sm90_stream {

template <class I>
using Sums = float[kSlicesPerWarp][I::kTiles][4];

template <class I>
using Rows =
    std::conditional_t<I::kScaleSums, IntegerRowPair<typename I::T, typename I::S, I::kBits>,
                       RowPair<typename I::T, typename I::S, I::kBits>>;

template <class I>
class StageMultiplier {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  // `slice`: of the warp's two, the first in a tile; `part`: of a stage's atoms, that of this warp.
  __device__ StageMultiplier(const Params& p, int slice, int part)
      : p_(p), slice_(slice), atom_(Keep(part * p.plan.warp_atoms)), lane_(Keep(threadIdx.x % 32)) {
    // Lane i reads row i % 8 of matrix i / 8: half i / 8 % 2 of a step, of the tile of tokens i / 16;
    // with a single tile, of the step i / 16.
    const int row = (kTogether == 1 ? 0 : lane_ / 16 * 8) + lane_ % 8;
    const int column = lane_ / 8 % (4 / kTogether);
    lhs_ = Keep(atom_ * kLhsBytes + row * kRowBytes + (column ^ row % 8) * kCopyBytes);
    scales_ = Keep(p.plan.bytes.lhs + p.plan.bytes.codes);
    // Stages begin with a group, or lie in one.
    const int groups = FirstGroup(p, atom_ + 1) - FirstGroup(p, atom_);
    group_step_ = Keep(groups * static_cast<int>(kAtom));
  }

  // A tile of `slices` that begins with slice `tile`.
  __device__ void StartTile(int tile, int slices) {
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      // With an odd number of slices the last warp multiplies its first twice.
      const int slice = tile + TileSlice(p_, min(slice_ + i, slices - 1));
      const int strip = slice / kSlicesPerStrip;
      // A strip's part in the tile, stored [atom][slice].
      const int begin = max(tile, strip * kSlicesPerStrip);
      const int end = min(tile + slices, (strip + 1) * kSlicesPerStrip);
      const int atom_bytes = (end - begin) * I::kSliceBytes;
      codes_[i] = Keep(
          p_.plan.bytes.lhs + (begin - tile) * (I::kSliceBytes << p_.plan.stage_shift) +
          (slice - begin) * I::kSliceBytes + atom_ * atom_bytes + lane_ * (I::kSliceBytes / 32));
      code_step_[i] = Keep(atom_bytes);
      const int group =
          (strip - tile / kSlicesPerStrip) * p_.plan.stage_groups + FirstGroup(p_, atom_);
      rows_[i] = Keep(group * static_cast<int>(kAtom) + slice % kSlicesPerStrip * kSliceRows +
                      lane_ / 4 * 2);
    }
  }

  // This warp's atoms of a stage of `atoms`.
  __device__ void Multiply(uint32_t stage, int atoms, Sums<I>& sums) const {
    const int own = min(p_.plan.warp_atoms, atoms - atom_);
    if (kTogetherAtoms == 2 && own == 2 && group_step_ == 0) {
      MultiplyAtoms<kTogetherAtoms, Groups::kOne>(stage, 0, sums);
      return;
    }
#pragma unroll 1
    for (int at = 0; at < own; ++at) {
      if (p_.groups_per_atom == 1) {
        MultiplyAtoms<1, Groups::kOne>(stage, at, sums);
      } else {
        MultiplyAtoms<1, Groups::kSmall>(stage, at, sums);
      }
    }
  }

 private:
  // Of what is multiplied at a time: all of it is in one group, or an atom in several.
  enum class Groups { kOne, kSmall };

  // One load of fragments is two tiles of tokens of one step; with a single tile, two steps.
  static constexpr int kTogether = I::kTiles == 1 ? 1 : 2;
  static constexpr int kRowBytes = kAtom * 2;  // of activations
  static constexpr int kLhsBytes = I::kTiles * 8 * kRowBytes;
  // What a warp multiplies at a time, so that instructions overlap: two atoms of two slices. With many
  // tokens registers are short.
  static constexpr int kTogetherAtoms = I::kTiles <= 2 && kBits == 4 ? 2 : 1;
  static constexpr int kTogetherSlices = I::kTiles <= 2 ? kSlicesPerWarp : 1;

  // kAtoms of the warp's atoms, from number `at` on.
  template <int kAtoms, Groups kGroups>
  __device__ void MultiplyAtoms(uint32_t stage, int at, Sums<I>& sums) const {
    const uint32_t lhs = stage + lhs_ + at * kLhsBytes;
    // With one tile of tokens every atom has sums of its own: more products that do not wait for each
    // other.
    constexpr int kChains = I::kTiles == 1 ? kAtoms : 1;
#pragma unroll
    for (int slice = 0; slice < kSlicesPerWarp; slice += kTogetherSlices) {
      Rows<I> rows[kTogetherSlices];
      uint32_t codes[kAtoms][kTogetherSlices][kStepsPerAtom][kWordsPerStep<kBits>];
      float part[kChains][kTogetherSlices][I::kTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kTogetherSlices; ++i) {
        rows[i].Start(I::kZero == ZeroKind::kFloat);
        LoadRows(stage, slice + i, at * group_step_, rows[i]);
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) {
          LoadCodes<kBits>(stage + codes_[slice + i] + (at + a) * code_step_[slice + i], lane_,
                           codes[a][i]);
        }
      }
      uint32_t fragments[kAtoms][4];
#pragma unroll
      for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) {
          if (kGroups == Groups::kSmall && step > 0 &&
              step * p_.groups_per_atom % kStepsPerAtom == 0) {
            const int group = step * p_.groups_per_atom / kStepsPerAtom;  // of the atom
#pragma unroll
            for (int i = 0; i < kTogetherSlices; ++i) {
              AddPart(rows[i], part[0][i], sums[slice + i]);
              LoadRows(stage, slice + i, at * group_step_ + group * static_cast<int>(kAtom),
                       rows[i]);
            }
          }
          uint32_t weights[kTogetherSlices][4];
#pragma unroll
          for (int i = 0; i < kTogetherSlices; ++i) {
            rows[i].Dequantize(codes[a][i][step], weights[i]);
          }
          // A step is two columns, and the permutation is an exclusive or of column numbers.
          const uint32_t column = (lhs + a * kLhsBytes) ^ (step * 2 * kCopyBytes);
#pragma unroll
          for (int tile = 0; tile < I::kTiles; tile += kTogether) {
            if (kTogether == 2 || step % 2 == 0) {
              LoadMatrices(fragments[a], column + tile * 8 * kRowBytes);
            }
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
              const int half = kTogether == 2 ? j : step % 2;
#pragma unroll
              for (int i = 0; i < kTogetherSlices; ++i) {
                float (&sum)[4] =
                    I::kScaleSums ? part[a % kChains][i][tile + j] : sums[slice + i][tile + j];
                Mma<T>(sum, weights[i], fragments[a][2 * half], fragments[a][2 * half + 1]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
        for (int i = 0; i < kTogetherSlices; ++i) {
          AddPart(rows[i], part[chain][i], sums[slice + i]);
        }
      }
    }
  }

  // Adds what a group has summed, and begins with zeros.
  __device__ static void AddPart(const Rows<I>& rows, float (&part)[I::kTiles][4],
                                 float (&sums)[I::kTiles][4]) {
    if constexpr (I::kScaleSums) {
#pragma unroll
      for (int tile = 0; tile < I::kTiles; ++tile) {
        rows.AddScaled(part[tile], sums[tile]);
#pragma unroll
        for (int j = 0; j < 4; ++j) part[tile][j] = 0;
      }
    }
  }

  // `on`: from the rows of the warp's first group, 64 for each group.
  __device__ void LoadRows(uint32_t stage, int slice, int on, Rows<I>& rows) const {
    const int row = rows_[slice] + on;
    rows.LoadScales(stage + scales_ + row * sizeof(S));
    if constexpr (I::kZero != ZeroKind::kNone) {
      const uint32_t zeros = stage + scales_ + p_.plan.bytes.scales;
      if constexpr (I::kZero == ZeroKind::kInteger) rows.LoadIntegerZeros(zeros + row);
      if constexpr (I::kZero == ZeroKind::kFloat) rows.LoadFloatZeros(zeros + row * sizeof(S));
    }
  }

  const Params& p_;
  const int slice_, atom_, lane_;  // the first slice of the tile, the first atom of a stage
  // Where this lane reads in a stage, for the warp's first atom, and from there to its second: the
  // activations, in bytes; each slice's codes, in bytes; the scales, in bytes, and each slice's among
  // them, in rows.
  int lhs_;
  int codes_[kSlicesPerWarp], code_step_[kSlicesPerWarp];
  int scales_, rows_[kSlicesPerWarp], group_step_;
};

}  // namespace jaxlowbit::qmm_sm90_stream
