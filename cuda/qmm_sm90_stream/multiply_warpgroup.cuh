// SPDX-License-Identifier: Apache-2.0
//
// The same of more than 8 tokens: what a warpgroup does with its two strips of channels and its atoms of a
// stage. Weights in registers, activations where they are, products of warpgroups: those of a warp take a
// tensor core about as long for every 8 tokens as one of these for 16.
//
//   registers 0   dequantize ─► products           dequantize ─► products        ...
//   registers 1                 dequantize ─► products           dequantize ─►
//
// A unit is one strip and half an atom: 8 registers of weights and two products. Scales multiply weights, so
// that sums stay where products add to them.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/qmm_sm90_stream/multiply.cuh"

namespace jaxlowbit::qmm_sm90_stream {

template <class I>
class WarpgroupMultiplier {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  // `part`: of a stage's atoms, that of this warpgroup.
  __device__ WarpgroupMultiplier(const Params& p, int part, int lane)
      : p_(p), atom_(Keep(part * p.plan.warp_atoms)), lane_(lane) {}

  // A tile; `own`: the first of the warp's two slices in it, in the order of TileSlice. The second is in the
  // strip beside, which may not be there.
  __device__ void StartTile(int own, int slices) {
    const int slice = TileSlice<I>(p_, own), strip = slice / kSlicesPerStrip;
    const int first_row = slice % kSlicesPerStrip * kSliceRows + lane_ / 4 * 2;
    codes_ = Keep(p_.plan.bytes.lhs + ((strip << p_.plan.stage_shift) + atom_) * kAtomBytes<kBits> +
                  slice % kSlicesPerStrip * I::kSliceBytes + lane_ * (I::kSliceBytes / 32));
    const int group = strip * p_.plan.stage_groups + FirstGroup(p_, atom_);
    row_ = Keep(group * static_cast<int>(kAtom) + first_row);
    strips_ = Keep(strip + 1 < slices / kSlicesPerStrip ? 2 : 1);
  }

  // This warpgroup's atoms of a stage, with which `left` atoms are left along k.
  __device__ void Multiply(uint32_t stage, uint32_t, int left, Sums<I>& sums) const {
    const int own = min(p_.plan.warp_atoms, left - atom_);
    if (own <= 0) return;
    if (p_.groups_per_atom > 1) {
      MultiplyStrips<Rows<I>, 0>(stage, own, sums);
    } else if (TakesFastest(stage, own)) {
      MultiplyStrips<FastestRows<I>, 1>(stage, own, sums);
    } else {
      MultiplyStrips<Rows<I>, 1>(stage, own, sums);
    }
    WaitProducts<0>();
    KeepAll(sums);
  }

 private:
  static constexpr int kLhsBytes = I::kTiles * 8 * kRowBytes;            // of an atom
  static constexpr int kUnits = 2, kUnitSteps = kStepsPerAtom / kUnits;  // of an atom
  // Of registers. With 32 tokens and two CTAs on a multiprocessor they are short, and other warps have work.
  static constexpr int kSets = I::kTiles > 2 && I::kCtasPerSm > 1 ? 1 : 2;
  static_assert(!I::kScaleSums);

  // Whether FastestRows take all scales of this warpgroup's, whose warps run the same products; in groups of
  // 64 and more.
  __device__ bool TakesFastest(uint32_t stage, int own) const {
    if constexpr (std::is_same_v<FastestRows<I>, Rows<I>>) {
      return true;
    } else {
      const int groups = p_.atom_step == 0 ? 1 : own;
      bool take = true;
#pragma unroll 1
      for (int i = 0; i < strips_; ++i) {
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          const int row = Row(i) + group * static_cast<int>(kAtom);
          take &= FastestRows<I>::Takes(Scales(stage) + row * static_cast<int>(sizeof(S)));
        }
      }
      return threadIdx.x < 128 ? AllOf(2, 128, take) : AllOf(3, 128, take);
    }
  }

  // kGroups: of an atom; 0: as many as it has.
  template <class R, int kGroups>
  __device__ void MultiplyStrips(uint32_t stage, int own, Sums<I>& sums) const {
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      if (i < strips_) MultiplyStrip<R, kGroups>(stage, i, own, sums[i]);
    }
  }

  template <class R, int kGroups>
  __device__ void MultiplyStrip(uint32_t stage, int i, int own,
                                float (&sums)[I::kTiles * 4]) const {
    const int groups = kGroups == 0 ? p_.groups_per_atom : kGroups;
    uint32_t lhs = DescribeOperand(stage + atom_ * kLhsBytes);
    uint32_t source = stage + codes_ + (i << p_.plan.stage_shift) * kAtomBytes<kBits>;
    int row = Row(i);
    R rows;
    rows.Start(I::kZero == ZeroKind::kFloat);
    LoadRows(stage, row, rows);
    uint32_t weights[kSets][kUnitSteps][4];
#pragma unroll 1
    for (int left = own;;) {
      // Uniform for the compiler, too: products take descriptions from uniform registers.
      const uint32_t description = __shfl_sync(~0u, lhs, 0);
      uint32_t codes[kStepsPerAtom][kWordsPerStep<kBits>];
      LoadCodes<kBits>(source, lane_, codes);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        uint32_t (&own_weights)[kUnitSteps][4] = weights[unit % kSets];
#pragma unroll
        for (int j = 0; j < kUnitSteps; ++j) {
          const int step = unit * kUnitSteps + j;
          if (kGroups == 0 && step > 0 && step * groups % kStepsPerAtom == 0) {
            const int group = step * groups / kStepsPerAtom;  // of the atom
            LoadRows(stage, row + group * static_cast<int>(kAtom), rows);
          }
          rows.Dequantize(codes[step], own_weights[j]);
        }
        KeepAll(own_weights);
        FenceOperands();
#pragma unroll
        for (int j = 0; j < kUnitSteps; ++j) {
          const int step = unit * kUnitSteps + j;
          WarpgroupMma<T, I::kTiles * 8>::Run(sums, own_weights[j],
                                              description + step * kStepDescription);
        }
        CommitProducts();
        WaitProducts<kSets - 1>();
      }
      if (--left == 0) return;
      source += kAtomBytes<kBits>;
      lhs += kLhsBytes >> 4;
      row += p_.atom_step;
      if (p_.atom_step > 0) LoadRows(stage, row, rows);
    }
  }

  // Where the scales of a stage are; in rows, those of slice `i`.
  __device__ uint32_t Scales(uint32_t stage) const {
    return stage + p_.plan.bytes.lhs + p_.plan.bytes.codes;
  }
  __device__ int Row(int i) const {
    return row_ + i * p_.plan.stage_groups * static_cast<int>(kAtom);
  }

  template <class R>
  __device__ void LoadRows(uint32_t stage, int row, R& rows) const {
    const uint32_t scales = Scales(stage), zeros = scales + p_.plan.bytes.scales;
    rows.LoadScales(scales + row * static_cast<int>(sizeof(S)));
    if constexpr (I::kZero == ZeroKind::kInteger) rows.LoadIntegerZeros(zeros + row);
    if constexpr (I::kZero == ZeroKind::kFloat) {
      rows.LoadFloatZeros(zeros + row * static_cast<int>(sizeof(S)));
    }
  }

  const Params& p_;
  const int atom_, lane_;  // the first atom of a stage
  // In a stage, of the warpgroup's first atom and first strip: where this lane's codes are, in bytes, and its
  // scales, in rows.
  int codes_, row_;
  int strips_;
};

}  // namespace jaxlowbit::qmm_sm90_stream
