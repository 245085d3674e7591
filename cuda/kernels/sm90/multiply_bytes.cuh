// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to accumulators where lhs has 8 bits: the twin of multiply.cuh, with twice the rate of the tensor cores.
//
//   registers 0   read ─► wgmma                   read ─► wgmma        ...
//   registers 1             read ─► wgmma  ─► add           read ─►
//
// Weights are not scaled: they are read to 8 bits as they stand, and the sums of a group, exact in int32 for int8, are
// scaled in float32 and added to those of results. A unit is one strip and one atom of k, two wgmma. The next unit is
// read while those of one run; where a group ends, the warpgroup waits for them and adds, while the other warpgroup's
// run. Tensor cores add products of float8 with few bits, so float8 is added every kMostAtoms too.
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

  // Multiplies all atoms of a task. The previous kernels have ended.
  __device__ void Multiply(const Task& task, Accumulators<I>& acc, Factors<I>& factors,
                           RingCursor& cursor) const {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int i = 0; i < I::kM / 2; ++i) acc[s][i] = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) factors[s][h] = 1;
    }
    if (p_.groups == 1) {
      MultiplyAll<Groups::kChannel>(task, acc, cursor);
    } else if (p_.atoms_per_group.divisor == 1) {
      MultiplyAll<Groups::kAtoms>(task, acc, cursor);
    } else {
      MultiplyAll<Groups::kStages>(task, acc, cursor);
    }
    ScaleTokens(task.tile, acc);
  }

 private:
  using StageConsumer<I>::kStripBytes;
  using StageConsumer<I>::Free;
  using StageConsumer<I>::p_;
  using StageConsumer<I>::memory_;
  using StageConsumer<I>::packed_;
  using StageConsumer<I>::row_;
  using StageConsumer<I>::strip_rows_;

  using Weights = ByteWeights<T, kBits, I::kCodebook>;
  using Sum = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;

  static constexpr int kSteps = 2;      // wgmma of an atom
  static constexpr int kMostAtoms = 8;  // whose float8 products are added without a stop

  // A group has all of k, an atom, or whole stages.
  enum class Groups { kChannel, kAtoms, kStages };

  struct State {
    int atom, end;  // the stage's first; the task's last and one
    int previous;   // the slot before, whose last wgmma may be in flight; or -1
    RingCursor cursor;
  };

  template <Groups kGroups>
  __device__ void MultiplyAll(const Task& task, Accumulators<I>& acc, RingCursor& cursor) const {
    Sum sums[I::kStrips][I::kM / 2];
    uint32_t weights[2][kSteps][4];
    float scales[I::kStrips][2];
    State state = {task.atom_begin, task.atom_end, -1, cursor};
    Wait(memory_.full(cursor.slot), cursor.parity);
    if (kGroups == Groups::kChannel) LoadScales(cursor.slot, 0, scales);
    Read(memory_.stage(p_.plan, cursor.slot), 0, 0, weights[0]);
    const int most = GroupAtoms<kGroups>();
    int left = kGroups == Groups::kStages ? most - p_.atoms_per_group.Remainder(state.atom) : most;
#pragma unroll 1
    while (state.atom < state.end) {
      const int group_end = min(state.end, state.atom + left);
      left = most;
      int adds = 0;
#pragma unroll 1
      while (state.atom + I::kStageAtoms <= group_end) {
        MultiplyStage<kGroups, I::kStageAtoms>(state, adds, weights, scales, sums, acc);
      }
      if (state.atom < group_end)
        MultiplyStage<kGroups, 1>(state, adds, weights, scales, sums, acc);
      if constexpr (kGroups != Groups::kAtoms) {
        if (kGroups == Groups::kStages) LoadScales(state.previous, 0, scales);
        WaitProducts<0>();
        Add(sums, scales, acc);
      }
    }
    Free(state.previous);
    cursor = state.cursor;
  }

  // Atoms after which sums are added to those of results: a group, or what else is to be added at once.
  template <Groups kGroups>
  __device__ int GroupAtoms() const {
    if (kGroups == Groups::kStages) return p_.atoms_per_group.divisor;
    return kGroups == Groups::kAtoms || std::is_same_v<T, int8_t> ? p_.k_blocks : kMostAtoms;
  }

  template <Groups kGroups, int kAtoms>
  __device__ void MultiplyStage(State& state, int& adds, uint32_t (&weights)[2][kSteps][4],
                                float (&scales)[I::kStrips][2], Sum (&sums)[I::kStrips][I::kM / 2],
                                Accumulators<I>& acc) const {
    constexpr int kUnits = kAtoms * I::kStrips;
    constexpr bool kAddsAtoms = kGroups == Groups::kAtoms;
    const uint32_t stage = memory_.stage(p_.plan, state.cursor.slot);
    // The shuffle makes the value uniform for the compiler too: wgmma takes descriptors from uniform registers.
    const uint32_t lhs = __shfl_sync(~0u, DescribeOperand(stage), 0);
    const int slot = state.cursor.slot;
    state.cursor.Advance(p_.plan.num_stages);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int a = unit / I::kStrips, s = unit % I::kStrips;
      uint32_t (&own)[kSteps][4] = weights[unit % 2];
      uint32_t (&others)[kSteps][4] = weights[(unit + 1) % 2];
      KeepAll(own);
      FenceOperands();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int first = kAddsAtoms ? 0 : a == 0 ? adds : 1;
        WarpgroupMmaBytes<T, I::kM>::Run(
            sums[s], own[step], lhs + (a * kSteps + step) * kStepDescription, step > 0 ? 1 : first);
      }
      CommitProducts();
      WaitProducts<1>();
      if (unit == 0) Free(state.previous);
      if (unit + 1 < kUnits) {
        Read(stage, (unit + 1) / I::kStrips, (unit + 1) % I::kStrips, others);
      } else if (state.atom + kAtoms < state.end) {
        Wait(memory_.full(state.cursor.slot), state.cursor.parity);
        Read(memory_.stage(p_.plan, state.cursor.slot), 0, 0, others);
      }
      if (kAddsAtoms && s == I::kStrips - 1) {
        LoadScales(slot, a, scales);
        WaitProducts<0>();
        Add(sums, scales, acc);
      }
    }
    adds = 1;
    state.atom += kAtoms;
    state.previous = slot;
  }

  // Reads the weights of an atom of a strip.
  __device__ void Read(uint32_t stage, int atom, int strip, uint32_t (&weights)[kSteps][4]) const {
    uint32_t packed[kBits];
    LoadTmaPacked<kBits>(stage + packed_ + strip * kStripBytes + atom * kAtomBytes<kBits>, 0, 0,
                         packed);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) Weights::Read(packed, step, weights[step]);
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

  // Adds the sums of a group, whose products have ended.
  __device__ static void Add(Sum (&sums)[I::kStrips][I::kM / 2],
                             const float (&scales)[I::kStrips][2], Accumulators<I>& acc) {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      KeepAll(sums[s]);
#pragma unroll
      for (int i = 0; i < I::kM / 2; ++i) {
        acc[s][i] = fmaf(static_cast<float>(sums[s][i]), scales[s][i / 2 % 2], acc[s][i]);
      }
    }
  }

  // Multiplies by the scales of tokens. Those of rows beyond the last are not stored, whatever they are.
  __device__ void ScaleTokens(const Tile& tile, Accumulators<I>& acc) const {
    const float* scales = p_.lhs_scale + int64_t{tile.batch} * p_.m;
    const int first = tile.m0 + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int block = 0; block < I::kM / 8; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scale = __ldg(scales + min(first + block * 8 + e, p_.m - 1));
#pragma unroll
        for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& sum = acc[s][block * 4 + h * 2 + e];
            sum = sum * Weights::kUnit * scale;
          }
        }
      }
    }
  }
};

}  // namespace jaxlowbit::sm90
