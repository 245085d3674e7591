// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to accumulators for 8-bit lhs: multiply.cuh at twice the rate of the tensor cores.
//
//   registers 0   read ─► wgmma                   read ─► wgmma        ...
//   registers 1             read ─► wgmma  ─► add           read ─►
//
// Weights become 8-bit values q - z or, with integer scales, (q - 8) * s; then one accumulator covers all of k. With
// float scales, the partial sum of each group (exact in int32 for int8) is scaled in float32 and added to the
// accumulators.
//
// A unit is one strip and one atom of k, two wgmma. While the wgmma of one unit run, the next unit's words are loaded,
// then converted as soon as the previous unit's registers are free. At the end of a group the warpgroup waits for its
// wgmma and adds the partial sums, while the other warpgroup's wgmma run. Tensor cores accumulate float8 products with
// few bits, so float8 partial sums are also added every kMaxAtoms atoms.
//
// Whole stages are multiplied: they contain zeros beyond k.
//
// With int32 results, accumulators contain the bits of integers, as StoreIntegers expects.
#pragma once

#include <type_traits>

#include "cuda/device/format/bytes.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/kernels/sm90/consumer.cuh"

namespace jaxlowbit::sm90 {

template <class I>
class ByteMultiplier : StageConsumer<I> {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  __device__ ByteMultiplier(const Params& p, Memory memory) : StageConsumer<I>(p, memory) {}

  // Multiplies all atoms of a task. Call after the previous kernels have ended.
  __device__ void Multiply(const Task& task, bool /*fits*/, Accumulators<I>& acc,
                           Factors<I>& factors, RingCursor& cursor) const {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) factors[s][0] = factors[s][1] = 1;
    if (!kHasGroupSums || I::kIntegerScales || p_.groups == 1) {
      MultiplyAll<Groups::kChannel>(task, acc, cursor);
    } else if constexpr (kHasGroupSums && !I::kIntegerScales) {
      if (p_.atoms_per_group.divisor == 1) {
        MultiplyAll<Groups::kAtoms>(task, acc, cursor);
      } else {
        MultiplyAll<Groups::kStages>(task, acc, cursor);
      }
    }
  }

 private:
  using StageConsumer<I>::kStripBytes;
  using StageConsumer<I>::Free;
  using StageConsumer<I>::p_;
  using StageConsumer<I>::memory_;
  using StageConsumer<I>::packed_;
  using StageConsumer<I>::row_;
  using StageConsumer<I>::strip_rows_;

  using Weights = ByteWeights<T, kBits, I::kCodebook, S, I::kZero == ZeroKind::kInteger>;
  using Sum = std::conditional_t<I::kIsInt8, int, float>;
  static constexpr bool kHasGroupSums =
      I::kTile.supports_8bit_lhs(false, I::kZero != ZeroKind::kNone);

  static constexpr bool kReadsRows = I::kIntegerScales || I::kZero == ZeroKind::kInteger;

  // Whether registers fit a unit's words and two units' weights: not with 8-bit weights in the largest tiles.
  static constexpr bool kLoadsAhead = kBits * I::kM * I::kStrips < 8 * 256;

  static constexpr float kUnit = 1.0f / (1 << Weights::kShift);
  static constexpr int kSteps = 2;  // wgmma of an atom
  static constexpr int kUnits = I::kStageAtoms * I::kStrips;
  static constexpr int kMaxAtoms = 8;  // atoms per float8 sum in the tensor cores

  // Group sizes: all of k, one atom, or whole stages.
  enum class Groups { kChannel, kAtoms, kStages };

  // Whether integer sums are the results: int8 with a single group.
  template <Groups kGroups>
  static constexpr bool kIsResult = kGroups == Groups::kChannel && I::kIsInt8;

  using Sums = Sum[I::kStrips][I::kM / 2];

  // The packed words of a unit.
  struct Words {
    uint32_t packed[kBits];
    uint32_t rows;  // bytes of two rows: integer scales or zeros
  };

  struct State {
    int atom, end;  // the stage's first atom; the end of the task
    int previous;   // the previous slot, whose last wgmma may be in flight; or -1
    RingCursor cursor;
    uint32_t weights[2][kSteps][4];  // of a unit, and of the next
    float scales[I::kStrips][2];     // of the current group
  };

  template <Groups kGroups>
  __device__ void MultiplyAll(const Task& task, Accumulators<I>& acc, RingCursor& cursor) const {
    Sums sums;
    State state;
    Factors<I> channels;
    if constexpr (I::kIntegerScales) {
      if (!p_.out_integers) LoadUnits<I>(p_, task.tile, channels);
    }
    state.atom = task.atom_begin, state.end = task.atom_end;
    state.previous = -1;
    state.cursor = cursor;
    if constexpr (!kIsResult<kGroups>) {
#pragma unroll
      for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
        for (int i = 0; i < I::kM / 2; ++i) acc[s][i] = 0;
      }
    }
    Wait(memory_.full(cursor.slot), cursor.parity);
    if (kGroups == Groups::kChannel && !I::kIntegerScales) LoadScales(cursor.slot, 0, state.scales);
    Words words;
    Load(cursor.slot, 0, 0, words);
    Read(words, state.weights[0]);
    if constexpr (kGroups == Groups::kAtoms) {
#pragma unroll 1
      while (state.atom < state.end) MultiplyAtoms(state, sums, acc);
    } else {
      const bool whole = kGroups == Groups::kChannel;
      const int span = !whole ? p_.atoms_per_group.divisor : I::kIsInt8 ? p_.k_blocks : kMaxAtoms;
      int left = whole ? span : span - p_.atoms_per_group.Remainder(state.atom);
#pragma unroll 1
      while (state.atom < state.end) {
        MultiplyGroup<kGroups>(state, left, sums, acc);
        left = span;
      }
    }
    Free(state.previous);
    cursor = state.cursor;
    if (!p_.out_integers) ScaleResults(task.tile, channels, acc);
  }

  // Multiplies the remaining stages of a group, `atoms` atoms of k, and adds its sums.
  template <Groups kGroups>
  __device__ void MultiplyGroup(State& state, int atoms, Sums& sums, Accumulators<I>& acc) const {
    const int group_end = min(state.end, state.atom + atoms);
    MultiplyStage<true>(state, sums);
#pragma unroll 1
    while (state.atom < group_end) MultiplyStage<false>(state, sums);
    if constexpr (kGroups == Groups::kStages) LoadScales(state.previous, 0, state.scales);
    WgmmaWait<0>();
    if constexpr (kIsResult<kGroups>) {
#pragma unroll
      for (int s = 0; s < I::kStrips; ++s) {
        FenceRegisters(sums[s]);
#pragma unroll
        for (int i = 0; i < I::kM / 2; ++i) {
          const float scale = I::kIntegerScales ? 1.0f : state.scales[s][i / 2 % 2];
          acc[s][i] = p_.out_integers ? __int_as_float(sums[s][i] >> Weights::kShift)
                                      : static_cast<float>(sums[s][i]) * scale;
        }
      }
    } else {
      Add(sums, state.scales, acc);
    }
  }

  // Multiplies a stage. `kBegins`: the stage is the first of a group, so its first products overwrite the sums.
  template <bool kBegins>
  __device__ void MultiplyStage(State& state, Sums& sums) const {
    const Stage stage = Begin(state);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      MultiplyUnit(stage, state, unit, kBegins && unit < I::kStrips, sums);
    }
    End(stage, state);
  }

  // Multiplies a stage whose atoms are groups.
  __device__ void MultiplyAtoms(State& state, Sums& sums, Accumulators<I>& acc) const {
    const Stage stage = Begin(state);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      MultiplyUnit(stage, state, unit, true, sums);
      if (unit % I::kStrips == I::kStrips - 1) {
        LoadScales(stage.slot, unit / I::kStrips, state.scales);
        WgmmaWait<0>();
        Add(sums, state.scales, acc);
      }
    }
    End(stage, state);
  }

  struct Stage {
    uint32_t lhs;  // as operand B
    int slot;
  };

  // Returns the current stage, after the wait for it, and advances the cursor.
  __device__ Stage Begin(State& state) const {
    const uint32_t memory = memory_.stage(p_.plan, state.cursor.slot);
    // wgmma reads descriptors from uniform registers; the shuffle tells the compiler that the value is uniform.
    const Stage stage = {__shfl_sync(~0u, DescribeOperand(memory), 0), state.cursor.slot};
    state.cursor.Advance(p_.plan.num_stages);
    return stage;
  }

  __device__ static void End(const Stage& stage, State& state) {
    state.atom += I::kStageAtoms;
    state.previous = stage.slot;
  }

  // Starts the products of a unit and converts the next one's weights while they run.
  __device__ void MultiplyUnit(const Stage& stage, State& state, int unit, bool begins,
                               Sums& sums) const {
    Start(stage, state, unit, sums[unit % I::kStrips], begins);
    if constexpr (!kLoadsAhead) WgmmaWait<1>();
    Words words;
    const bool has_next = LoadNext(stage, state, unit, words);
    WgmmaWait<1>();
    if (unit == 0) Free(state.previous);
    if (has_next) Read(words, state.weights[(unit + 1) % 2]);
  }

  // Starts the products of a unit with converted weights. `begins`: products overwrite `sums`.
  __device__ static void Start(const Stage& stage, State& state, int unit, Sum (&sums)[I::kM / 2],
                               bool begins) {
    uint32_t (&weights)[kSteps][4] = state.weights[unit % 2];
    FenceRegisters(weights);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      WarpgroupMmaBytes<T, I::kM>::Run(
          sums, weights[step], stage.lhs + (unit / I::kStrips * kSteps + step) * kStepDescription,
          step > 0 || !begins ? 1 : 0);
    }
    WgmmaCommit();
  }

  // Loads the unit after `unit`, possibly from the next stage. Returns false if there is none.
  __device__ bool LoadNext(const Stage& stage, const State& state, int unit, Words& words) const {
    if (unit + 1 < kUnits) {
      Load(stage.slot, (unit + 1) / I::kStrips, (unit + 1) % I::kStrips, words);
      return true;
    }
    const bool has_next = state.atom + I::kStageAtoms < state.end;
    if (has_next) {
      Wait(memory_.full(state.cursor.slot), state.cursor.parity);
      Load(state.cursor.slot, 0, 0, words);
    }
    return has_next;
  }

  // Loads the words of one atom and strip.
  __device__ void Load(int slot, int atom, int strip, Words& words) const {
    const uint32_t first = memory_.stage(p_.plan, slot) + packed_ + strip * kStripBytes;
    LoadTmaPacked<kBits>(first + atom * kAtomBytes<kBits>, 0, 0, words.packed);
    if constexpr (kReadsRows) {
      const int group = p_.atoms_per_group.divisor == 1 ? atom : 0;
      const int row = row_ + strip * strip_rows_ + group * static_cast<int>(kAtom);
      // Zeros follow scales.
      const int first_byte = I::kIntegerScales ? 0 : p_.plan.bytes.scales;
      words.rows = LoadShared2(memory_.scales(p_.plan, slot) + first_byte + row);
    }
  }

  // Converts the loaded words of a unit to weights.
  __device__ static void Read(const Words& words, uint32_t (&weights)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kReadsRows) {
        Weights::Read(words.packed, step, words.rows, weights[step]);
      } else {
        Weights::Read(words.packed, step, weights[step]);
      }
    }
  }

  // Loads the scales of a group of a stage.
  __device__ void LoadScales(int slot, int group, float (&scales)[I::kStrips][2]) const {
    const uint32_t first = memory_.scales(p_.plan, slot);
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int row = row_ + s * strip_rows_ + group * static_cast<int>(kAtom);
      LoadFloats<S>(first + row * static_cast<int>(sizeof(S)), scales[s]);
    }
  }

  // Adds the scaled sums of a group; its products must have ended.
  __device__ static void Add(Sums& sums, const float (&scales)[I::kStrips][2],
                             Accumulators<I>& acc) {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      FenceRegisters(sums[s]);
#pragma unroll
      for (int i = 0; i < I::kM / 2; ++i) {
        acc[s][i] = fmaf(static_cast<float>(sums[s][i]), scales[s][i / 2 % 2], acc[s][i]);
      }
    }
  }

  // Multiplies by the scales of tokens and channels. Tokens beyond the last are never stored.
  __device__ void ScaleResults(const Tile& tile, const Factors<I>& channels,
                               Accumulators<I>& acc) const {
    const Batched<int> schedule = ScheduleOf(p_);
    const float* scales = p_.lhs_scale + schedule.Row(tile.batch, 0);
    asm volatile(
        ""
        : "+l"(scales));  // keeps the compiler from recomputing addresses from the batch element
    const int first = tile.m0 + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int block = 0; block < I::kM / 8; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int last = schedule.Rows(tile.batch) - 1;
        const float scale = __ldg(scales + min(first + block * 8 + e, last));
#pragma unroll
        for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& sum = acc[s][block * 4 + h * 2 + e];
            sum = sum * (I::kIntegerScales ? channels[s][h] : kUnit) * scale;
          }
        }
      }
    }
  }
};

}  // namespace jaxlowbit::sm90
