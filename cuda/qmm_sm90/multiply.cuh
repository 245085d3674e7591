// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to sums: what a warpgroup does with its strips of a tile.
//
//   registers 0   dequantize ─► products           dequantize ─► products        ...
//   registers 1                 dequantize ─► products           dequantize ─►
//
// A unit is one strip and one atom of k: 16 registers of weights, four products. There are two sets
// of registers, so while the products of one unit run, the next is dequantized.
#pragma once

#include "cuda/device/rows.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/qmm_sm90/params.cuh"

namespace jaxlowbit::qmm_sm90 {

template <class I>
using Sums = float[I::kStrips][I::kTokens / 2];

template <class I>
class TileMultiplier {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  __device__ TileMultiplier(const Params& p, const Share& share, Memory memory)
      : p_(p), share_(share), memory_(memory) {
    const int strip = threadIdx.x / 128 * I::kStrips, warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    codes_ = Keep(p.plan.bytes.lhs + strip * kStripBytes +
                  (warp * 32 + lane) * (kAtomBytes<kBits> / 128));
    scales_ = Keep(p.plan.bytes.lhs + p.plan.bytes.codes);
    row_ = Keep(strip * p.plan.stage_groups * static_cast<int>(kAtom) + warp * 16 + lane / 4 * 2);
    strip_rows_ = Keep(p.plan.stage_groups * static_cast<int>(kAtom));
    mate_ = lane < 1 << p.mate_shift;
    free_ = MapToRank(memory.empty(0), RankOf(p, share.part, mate_ ? lane : 0));
  }

  // All of this CTA's atoms of a tile.
  __device__ void Multiply(Sums<I>& sums, RingCursor& cursor) const {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int i = 0; i < I::kTokens / 2; ++i) sums[s][i] = 0;
    }
    State state = {share_.atom_begin, -1, 0, 0, cursor};
    Unit unit;
    EnterStage(state);
    Load(state, 0, 0, unit);
#pragma unroll 1
    while (state.atom + kTogether <= share_.atom_end) MultiplyAtoms<kTogether>(state, unit, sums);
    if (kTogether > 1 && state.atom < share_.atom_end) MultiplyAtoms<1>(state, unit, sums);
    WaitProducts<0>();
    KeepAll(sums);
    Free(state.previous);
    cursor = state.cursor;
  }

 private:
  static constexpr int kStripBytes = I::kStageAtoms * kAtomBytes<kBits>;
  // Atoms of a round: whole stages, and an even number of units, so that each has registers of its own.
  static constexpr int kTogether = I::kStageAtoms == 2 || I::kStrips % 2 != 0 ? 2 : 1;

  struct State {
    int atom;        // the next of the CTA
    int previous;    // the slot before, whose last products may be under way; or -1
    uint32_t stage;  // the one with that atom
    int group;       // the first of that stage
    RingCursor cursor;
  };

  // What a unit is dequantized from, loaded before the products of the unit before it are issued.
  struct Unit {
    uint32_t codes[kStepsPerAtom][kWordsPerStep<kBits>];
    ScaledRowPair<T, S, kBits> rows;
  };

  // This warp has read the stage, into which mates may copy.
  __device__ void Free(int slot) const {
    __syncwarp();
    if (mate_) ArriveRemoteAfterReads(free_ + slot * kBarrierBytes);
  }

  __device__ void EnterStage(State& state) const {
    Wait(memory_.full(state.cursor.slot), state.cursor.parity);
    state.stage = memory_.stage(p_.plan, state.cursor.slot);
    state.group = FirstGroup(p_, state.atom);
  }

  __device__ void Load(const State& state, int strip, int in_stage, Unit& unit) const {
    LoadCodes<kBits>(state.stage + codes_ + strip * kStripBytes + in_stage * kAtomBytes<kBits>,
                     threadIdx.x % 32, unit.codes);
    unit.rows.Start(I::kZero == ZeroKind::kFloat);
    LoadRows(state, strip, in_stage, 0, unit.rows);
  }

  __device__ void Dequantize(const State& state, int strip, int in_stage, Unit& unit,
                             uint32_t (&weights)[kStepsPerAtom][4]) const {
#pragma unroll
    for (int step = 0; step < kStepsPerAtom; ++step) {
      if (step == kStepsPerAtom / 2 && p_.groups_per_atom > 1) {
        LoadRows(state, strip, in_stage, 1, unit.rows);
      }
      unit.rows.Dequantize(unit.codes[step], weights[step]);
    }
    KeepAll(weights);
  }

  template <int kAtoms>
  __device__ void MultiplyAtoms(State& state, Unit& unit, Sums<I>& sums) const {
    uint32_t weights[2][kStepsPerAtom][4];
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      const int in_stage = a % I::kStageAtoms;
      const uint64_t lhs = DescribeOperand(state.stage + in_stage * I::kTokens * 128);
      const int previous = state.previous;
#pragma unroll
      for (int s = 0; s < I::kStrips; ++s) {
        uint32_t (&own)[kStepsPerAtom][4] = weights[(a * I::kStrips + s) % 2];
        Dequantize(state, s, in_stage, unit, own);
        if (s + 1 < I::kStrips) {
          Load(state, s + 1, in_stage, unit);
        } else if (in_stage < I::kStageAtoms - 1 && a < kAtoms - 1) {
          Load(state, 0, in_stage + 1, unit);
        } else {
          state.atom += I::kStageAtoms;
          state.previous = state.cursor.slot;
          state.cursor.Advance(p_.plan.num_stages);
          if (state.atom < share_.atom_end) {
            EnterStage(state);
            Load(state, 0, 0, unit);
          }
        }
        FenceOperands();
#pragma unroll
        for (int step = 0; step < kStepsPerAtom; ++step) {
          WarpgroupMma<T, I::kTokens>::Run(sums[s], own[step], lhs + step * kStepDescription);
        }
        CommitProducts();
        WaitProducts<1>();
        if (in_stage == 0 && s == 0 && previous >= 0) Free(previous);
      }
    }
  }

  // `half`: of an atom with groups of 32.
  __device__ void LoadRows(const State& state, int strip, int in_stage, int half,
                           ScaledRowPair<T, S, kBits>& rows) const {
    const int group = FirstGroup(p_, state.atom + in_stage) - state.group + half;
    const int row = row_ + strip * strip_rows_ + group * static_cast<int>(kAtom);
    const uint32_t stage = state.stage;
    rows.LoadScales(stage + scales_ + row * sizeof(S));
    if constexpr (I::kZero != ZeroKind::kNone) {
      const uint32_t zeros = stage + scales_ + p_.plan.bytes.scales;
      if constexpr (I::kZero == ZeroKind::kInteger) rows.LoadIntegerZeros(zeros + row);
      if constexpr (I::kZero == ZeroKind::kFloat) rows.LoadFloatZeros(zeros + row * sizeof(S));
    }
  }

  const Params& p_;
  const Share& share_;
  const Memory memory_;
  // In a stage, of this lane and the warpgroup's first strip: its codes, in bytes; the scales, in
  // bytes, and its own among them, in rows.
  int codes_, scales_, row_, strip_rows_;
  bool mate_;      // this lane tells one mate of free stages
  uint32_t free_;  // where
};

}  // namespace jaxlowbit::qmm_sm90
