// SPDX-License-Identifier: Apache-2.0
//
// Multiplies the stages of a tile: shared memory to accumulators. Per step of 16 k: ldmatrix of lhs fragments,
// dequantization in registers, mma.
#pragma once

#include <type_traits>

#include "cuda/device/mma.cuh"
#include "cuda/kernels/sm80/weights.cuh"

namespace jaxlowbit::sm80 {

template <class I>
using Accumulators = float[kAtomsN][I::kTiles][4];

// A register holds two neighbouring rows.
template <class I>
using HalfAccumulators = uint32_t[kAtomsN][I::kTiles][2];

template <class I>
class StageMultiplier {
 public:
  using T = typename I::T;
  static constexpr int kBits = I::kBits;

  __device__ StageMultiplier(const Params& p, const Tile& tile)
      : p_(p),
        atoms_left_(p.k_blocks - tile.stage_begin * I::kAtomsK),
        cursor_(GroupCursor::At(p, tile.stage_begin * I::kBlockK)),
        loaded_(-1) {
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
      StartRows(p.zero_bytes > 1, Table<I::kCodebook>(p.table), rows_[atom]);
    }
    // ldmatrix: lane i passes row i % 8 of matrix i / 8, which is k half i / 8 % 2 of row tile i / 16.
    const int lane = threadIdx.x % 32;
    const int row = I::kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8;
    lhs_chunk_ = Opaque(LhsChunk<I>(row, lane / 8 % 2) * kCopyBytes);
  }

  __device__ void MultiplyNext(uint32_t slot, Accumulators<I>& acc) {
    const uint32_t scales = slot + p_.bytes.packed + p_.bytes.lhs;
    if (cursor_.group != loaded_) StartGroup(scales, cursor_.group, acc);
    const int left =
        p_.group_size - cursor_.offset;  // k left in the group, in this stage and beyond
    if (kHasOneGroupForm && left >= I::kBlockK && atoms_left_ >= I::kAtomsK) {
      MultiplyAtoms<true>(slot, scales, left, acc);
    } else {
      MultiplyAtoms<false>(slot, scales, left, acc);
    }
    atoms_left_ -= I::kAtomsK;
    if constexpr (I::kPartials == PartialSums::kHalfStages) AddHalfAccumulators(acc);
    cursor_.AdvanceStage(p_);
  }

  // Completes the accumulators after the last stage.
  __device__ void Finish(Accumulators<I>& acc) { ScaleGroup(acc); }

 private:
  // Fast path for a stage inside one group: a per-step group test would prevent overlap of steps. Large tiles overlap
  // within a step, and have no registers to spare.
  static constexpr bool kHasOneGroupForm = I::kTiles < 8;

  // Without kOneGroup, groups change at `group_end` and every group_size from there.
  template <bool kOneGroup>
  __device__ void MultiplyAtoms(uint32_t slot, uint32_t scales, int group_end,
                                Accumulators<I>& acc) {
#pragma unroll
    for (int k_atom = 0; k_atom < I::kAtomsK; ++k_atom) {
      // Skips padding beyond k. Without zero points, its zeros could dequantize to infinity with large scales.
      if (!kOneGroup && k_atom > 0 && k_atom >= atoms_left_) break;
      uint32_t packed[kAtomsN][kBits];
#pragma unroll
      for (int atom = 0; atom < kAtomsN; ++atom) {
        packed_.Load(slot + (atom * I::kAtomsK + k_atom) * kAtomBytes<kBits>, packed[atom]);
      }
#pragma unroll
      for (int i = 0; i < kStepsPerAtom; ++i) {
        const int step = k_atom * kStepsPerAtom + i;
        if (!kOneGroup && step > 0 && step * kStepK == group_end) {
          group_end += p_.group_size;
          StartGroup(scales, loaded_ + 1, acc);
        }
        uint32_t weights[kAtomsN][4];
#pragma unroll
        for (int atom = 0; atom < kAtomsN; ++atom) {
          rows_[atom].template Dequantize<I::kPartials != PartialSums::kGroups>(packed[atom], i,
                                                                                weights[atom]);
        }
        if constexpr (I::kPartials == PartialSums::kNone) {
          MultiplyStep(slot + p_.bytes.packed, step, weights, acc);
        } else {
          MultiplyStep(slot + p_.bytes.packed, step, weights, partial_);
        }
      }
    }
  }

  // Multiplies all rows by one step, two mma row tiles at a time.
  template <class StepAccumulators>
  __device__ void MultiplyStep(uint32_t lhs, int step, const uint32_t (&weights)[kAtomsN][4],
                               StepAccumulators& acc) const {
    constexpr int kUnroll = I::kTiles == 1 ? 1 : 2;
    // A step is two columns; the swizzle XORs column numbers.
    const uint32_t chunk = lhs + (lhs_chunk_ ^ (step * 2 * kCopyBytes));
#pragma unroll
    for (int tile = 0; tile < I::kTiles; tile += kUnroll) {
      uint32_t fragments[2 * kUnroll];
      LoadMatrices(fragments, chunk + tile * 8 * I::kLhsChunks * kCopyBytes);
#pragma unroll
      for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          Mma<T>(acc[atom][tile + i], weights[atom], fragments[2 * i], fragments[2 * i + 1]);
        }
      }
    }
  }

  __device__ void StartGroup(uint32_t scales, int group, Accumulators<I>& acc) {
    ScaleGroup(acc);
    loaded_ = group;
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
      LoadRows<I>(p_, scales, atom * p_.groups_per_stage + group - cursor_.group, rows_[atom]);
    }
  }

  // If scales multiply accumulators, adds the scaled partial sums of the loaded group.
  __device__ void ScaleGroup(Accumulators<I>& acc) {
    if constexpr (I::kPartials == PartialSums::kGroups) {
#pragma unroll
      for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
        for (int tile = 0; tile < I::kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& part = partial_[atom][tile][i];
            if (loaded_ >= 0) acc[atom][tile][i] += part * rows_[atom].scale(i / 2);
            part = 0;
          }
        }
      }
    }
  }

  // Adds the float16 partial sums of a stage.
  __device__ void AddHalfAccumulators(Accumulators<I>& acc) {
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
      for (int tile = 0; tile < I::kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t& pair = partial_[atom][tile][i / 2];
          acc[atom][tile][i] += __half2float(__ushort_as_half(pair >> i % 2 * 16));
          if (i % 2 == 1) pair = 0;
        }
      }
    }
  }

  const Params& p_;
  int atoms_left_;      // along k, from the next stage on
  GroupCursor cursor_;  // at the first k of the next stage
  int loaded_;          // the group in rows_
  int lhs_chunk_;       // of the first step, in bytes
  PackedLoader<I> packed_;
  Rows<I> rows_[kAtomsN];
  std::conditional_t<I::kPartials == PartialSums::kHalfStages, HalfAccumulators<I>, Accumulators<I>>
      partial_ = {};
};

}  // namespace jaxlowbit::sm80
