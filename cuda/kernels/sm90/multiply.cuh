// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to accumulators: a warpgroup multiplies its strips of a tile.
//
//   registers 0   dequantize ─► wgmma           dequantize ─► wgmma        ...
//   registers 1                 dequantize ─► wgmma           dequantize ─►
//
// A unit is one strip and one atom of k, or half an atom if a warpgroup has a single strip: 16 or 8 registers of
// weights, four or two wgmma. There are two sets of registers, so the next unit is dequantized while the wgmma of one
// unit run.
//
// The four loops are in loops.cuh.
#pragma once

#include <type_traits>

#include "cuda/device/packed.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/kernels/sm90/consumer.cuh"
#include "cuda/kernels/sm90/loops.cuh"

namespace jaxlowbit::sm90 {

// The table is a base class so that it is empty for other codebooks.
template <class I>
class TileMultiplier : Table<I::kCodebook>, StageConsumer<I> {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  __device__ TileMultiplier(const Params& p, Memory memory)
      : Table<I::kCodebook>(p.table), StageConsumer<I>(p, memory) {
    if constexpr (kPlanes > 1) {
      const int lane = threadIdx.x % 128;  // within the atom
      second_ = Opaque(SecondPlane<kBits>(lane) - FirstPlane<kBits>(lane));
      if constexpr (kPlanes > 2) third_ = Opaque(ThirdPlane<kBits>(lane) - FirstPlane<kBits>(lane));
    }
  }

  // Multiplies all atoms of a task. Call after the previous kernels have ended. `fits`: Loops::Fits.
  __device__ void Multiply(const Task& task, bool fits, Accumulators<I>& acc, Factors<I>& factors,
                           RingCursor& cursor) const {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int i = 0; i < I::kM / 2; ++i) acc[s][i] = 0;
    }
    MultiplyWeights(task, fits, acc, factors, cursor);
    if (p_.units.data == nullptr) return;
    // Applies the factors before the tensor scales (units): factors times the largest ones would overflow.
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int i = 0; i < I::kM / 2; ++i) acc[s][i] *= factors[s][i / 2 % 2];
    }
    LoadUnits<I>(p_, task.tile, factors);
  }

 private:
  using StageConsumer<I>::kStripBytes;
  using StageConsumer<I>::Free;
  using StageConsumer<I>::p_;
  using StageConsumer<I>::memory_;
  using StageConsumer<I>::packed_;
  using StageConsumer<I>::row_;
  using StageConsumer<I>::strip_rows_;

  // Computes accumulators; acc * factors is the product without units.
  __device__ void MultiplyWeights(const Task& task, bool fits, Accumulators<I>& acc,
                                  Factors<I>& factors, RingCursor& cursor) const {
    if constexpr (I::kScalesChannels) {
      if (p_.groups == 1) {
        ChannelRows pairs[I::kStrips];
        Wait(memory_.full(cursor.slot), cursor.parity);
#pragma unroll
        for (int s = 0; s < I::kStrips; ++s) {
          LoadRows(memory_.scales(p_.plan, cursor.slot), row_ + s * strip_rows_, pairs[s]);
#pragma unroll
          for (int h = 0; h < 2; ++h) factors[s][h] = pairs[s].Factor(h);
        }
        MultiplyAll(task, pairs, acc, cursor);
        // kUnit times the factors would overflow for the largest scales.
#pragma unroll
        for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
          for (int i = 0; i < I::kM / 2; ++i) acc[s][i] *= kUnit;
        }
        return;
      }
    }
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) factors[s][h] = kUnit;
    }
    if constexpr (L::kHasLongRows) {
      if (L::HasLongGroups(p_) && fits) return MultiplyGroups<LongRows>(task, acc, cursor);
    }
    if constexpr (kMicroGroups > 0) {
      if (L::HasMicroGroups(p_) && fits) return MultiplyGroups<MicroRows>(task, acc, cursor);
    }
    MultiplyGroups<GroupRows>(task, acc, cursor);
  }

  using L = Loops<I>;
  using GroupRows = typename L::GroupRows;
  using LongRows = typename L::LongRows;
  using MicroRows = typename L::MicroRows;
  using ChannelRows = typename L::ChannelRows;
  static constexpr int kLongAtoms = L::kLongAtoms, kMicroGroups = L::kMicroGroups;

  // Whether GroupRows load scales at every step instead of branching at possible group starts. A branch in the middle
  // of a unit is most expensive if weights wait for lookups, or if most groups have 16 rows.
  static constexpr bool kLoadsEachStep =
      I::kSupportsGroupsOf16 && (kLooksUp<I::kCodebook> || kMicroGroupsOf<S> == kStepsPerAtom);
  static constexpr bool kBothHalves = I::kM <= 128 && I::kZero != ZeroKind::kNone;

  static constexpr int kPlanes = kNumPlanes<kBits>;
  static constexpr float kUnit = 1 << kProductShift<T, S, I::kCodebook>;  // of accumulators
  // Units per atom and strip.
  static constexpr int kUnits = I::kStrips == 1 ? 2 : 1;
  static constexpr int kUnitSteps = kStepsPerAtom / kUnits;
  static constexpr int kMiddle = kStepsPerAtom / 2;  // the first step of an atom's second half
  // Atoms per iteration: whole stages and an even number of units, so that register sets alternate statically.
  static constexpr int kUnroll = I::kStageAtoms == 2 || I::kStrips * kUnits % 2 != 0 ? 2 : 1;

  // Whether a unit's words are loaded before the wait for its registers. Requires spare registers.
  static constexpr bool kLoadsFirst = I::kStrips == 1 && I::kTile.warpgroups <= 2 && I::kM < 256;

  struct State {
    int atom;      // the next atom
    int left;      // atoms left in its group, the next one included
    int previous;  // the previous slot, whose last wgmma may be in flight; or -1
    RingCursor cursor;
    int group_atoms, group_rows;  // atoms per group; scale rows per atom
  };

  template <class R>
  __device__ void MultiplyGroups(const Task& task, Accumulators<I>& acc, RingCursor& cursor) const {
    R pairs[I::kStrips];
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      StartRows<R, I::kCodebook>(I::kZero == ZeroKind::kFloat, *this, pairs[s]);
    }
    MultiplyAll(task, pairs, acc, cursor);
  }

  template <class R>
  __device__ void MultiplyAll(const Task& task, R (&pairs)[I::kStrips], Accumulators<I>& acc,
                              RingCursor& cursor) const {
    const int begin = task.atom_begin, end = Opaque(task.atom_end);
    const int group_atoms = Opaque(p_.atoms_per_group.divisor);
    const int group_rows = Opaque(p_.groups_per_atom * static_cast<int>(kAtom));
    State state = {begin,       group_atoms - p_.atoms_per_group.Remainder(begin),
                   -1,          cursor,
                   group_atoms, group_rows};
#pragma unroll 1
    while (state.atom + kUnroll <= end) MultiplyAtoms<kUnroll>(state, pairs, acc);
    if (kUnroll > 1 && state.atom < end) MultiplyAtoms<1>(state, pairs, acc);
    WgmmaWait<0>();
    FenceRegisters(acc);
    Free(state.previous);
    cursor = state.cursor;
  }

  // A stage in shared memory.
  struct Stage {
    uint32_t memory, lhs, scales;  // addresses; lhs as operand B
    int rows;                      // offset of the next atom's scales in the stage, in rows
  };

  template <class R>
  static constexpr bool kGroups = std::is_same_v<R, GroupRows>;
  template <class R>
  static constexpr bool kLong = std::is_same_v<R, LongRows>;
  template <class R>
  static constexpr bool kMicro = std::is_same_v<R, MicroRows>;
  // Whether groups may begin inside a stage.
  template <class R>
  static constexpr bool kWithinStages = kLong<R> && kLongAtoms < I::kStageAtoms;

  // Multiplies kAtoms atoms, beginning with a stage.
  template <int kAtoms, class R>
  __device__ void MultiplyAtoms(State& state, R (&pairs)[I::kStrips], Accumulators<I>& acc) const {
    uint32_t weights[2][kUnitSteps][4];
    Stage stage;
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      const int in_stage = a % I::kStageAtoms;
      if (in_stage == 0) stage = BeginStage(state.cursor, pairs);
#pragma unroll
      for (int s = 0; s < I::kStrips; ++s) {
        MultiplyAtom<kAtoms>(state, stage, a, s, pairs[s], weights, acc[s]);
      }
      if ((kGroups<R> || kWithinStages<R>) && --state.left == 0) {
        state.left = state.group_atoms;
        stage.rows += state.group_rows;
      }
      ++state.atom;
      if (in_stage == I::kStageAtoms - 1 || a == kAtoms - 1) {
        state.previous = state.cursor.slot;
        state.cursor.Advance(p_.plan.num_stages);
      }
    }
  }

  template <class R>
  __device__ Stage BeginStage(const RingCursor& cursor, R (&pairs)[I::kStrips]) const {
    Wait(memory_.full(cursor.slot), cursor.parity);
    Stage stage;
    stage.memory = memory_.stage(p_.plan, cursor.slot);
    stage.scales = memory_.scales(p_.plan, cursor.slot);
    // wgmma reads descriptors from uniform registers; the shuffle tells the compiler that the value is uniform.
    stage.lhs = __shfl_sync(~0u, DescribeOperand(stage.memory), 0);
    stage.rows = 0;
    if constexpr (kMicro<R>) {
#pragma unroll
      for (int s = 0; s < I::kStrips; ++s) {
        pairs[s].LoadGroups(stage.scales + (row_ + s * strip_rows_) * sizeof(S));
      }
    }
    return stage;
  }

  // Multiplies atom `a` of kAtoms and strip `s` in units, which alternate between the sets of `weights`.
  template <int kAtoms, class R>
  __device__ void MultiplyAtom(const State& state, const Stage& stage, int a, int s, R& rows,
                               uint32_t (&weights)[2][kUnitSteps][4],
                               float (&acc)[I::kM / 2]) const {
    // After a unit's commit, waiting for all but one wgmma group completes the previous stage, which can be freed. With
    // kLoadsFirst the wait moves to the start of the next unit, which must exist in this call.
    constexpr bool kDeferredWait = kLoadsFirst && kAtoms * kUnits > 1;
    const int in_stage = a % I::kStageAtoms;
    uint32_t packed[kBits];
    const uint32_t words = stage.memory + packed_ + s * kStripBytes + in_stage * kAtomBytes<kBits>;
    LoadTmaPacked<kBits>(words, kPlanes > 1 ? words + second_ : 0, kPlanes > 2 ? words + third_ : 0,
                         packed);
    const int row = row_ + s * strip_rows_ + stage.rows;
    const bool begins = kWithinStages<R> && state.left == state.group_atoms;
    if (kGroups<R> || (kLong<R> && in_stage == 0) || begins) LoadRows(stage.scales, row, rows);
    R second = rows;  // of the atom's second half
    if (kGroups<R> && kBothHalves) {
      LoadRows(stage.scales, row + (p_.groups_per_atom - 1) * static_cast<int>(kAtom), second);
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int in_stage_unit = (in_stage * I::kStrips + s) * kUnits + unit;
      uint32_t (&own)[kUnitSteps][4] = weights[((a * I::kStrips + s) * kUnits + unit) % 2];
      const int first = unit * kUnitSteps;
      if (kDeferredWait) WgmmaWait<1>();
      if (kDeferredWait && in_stage_unit == 1) Free(state.previous);
#pragma unroll
      for (int step = 0; step < kUnitSteps; ++step) {
        StartStep(stage.scales, row, in_stage, first + step, rows);
        const bool later = kGroups<R> && kBothHalves && first + step >= kMiddle;
        (later ? second : rows).Dequantize(packed, first + step, own[step]);
      }
      FenceRegisters(own);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < kUnitSteps; ++step) {
        WarpgroupMma<T, I::kM>::Run(
            acc, own[step],
            stage.lhs + in_stage * (I::kLhsBytes >> 4) + (first + step) * kStepDescription);
      }
      WgmmaCommit();
      if (!kDeferredWait) WgmmaWait<1>();
      if (!kDeferredWait && in_stage_unit == 0) Free(state.previous);
    }
  }

  // Loads the scales of the group that begins with a step of an atom, if one may.
  template <class R>
  __device__ void StartStep(uint32_t scales, int row, int in_stage, int step, R& rows) const {
    if constexpr (I::kSupportsGroupsOf16) {
      const int groups = step * p_.groups_per_atom;  // times kStepsPerAtom
      if (kGroups<R> && step > 0 && (kLoadsEachStep || groups % kStepsPerAtom == 0)) {
        LoadRows(scales, row + groups / kStepsPerAtom * static_cast<int>(kAtom), rows);
      }
    } else if (kGroups<R> && !kBothHalves && step == kMiddle && p_.groups_per_atom > 1) {
      LoadRows(scales, row + static_cast<int>(kAtom), rows);
    }
    if constexpr (kMicro<R>) {
      const int groups = step * kMicroGroups;  // times kStepsPerAtom
      if (groups % kStepsPerAtom == 0) {
        rows.UseGroup(in_stage * kMicroGroups + groups / kStepsPerAtom);
      }
    }
  }

  template <class R>
  __device__ void LoadRows(uint32_t scales, int row, R& rows) const {
    rows.LoadScales(scales + row * sizeof(S));
    if constexpr (I::kZero != ZeroKind::kNone) {
      const uint32_t zeros = scales + p_.plan.bytes.scales;
      if constexpr (I::kZero == ZeroKind::kInteger) rows.LoadIntegerZeros(zeros + row);
      if constexpr (I::kZero == ZeroKind::kFloat) rows.LoadFloatZeros(zeros + row * sizeof(S));
    }
  }

  int second_, third_;  // offsets of the other planes' words from the first plane's
};

}  // namespace jaxlowbit::sm90
