// SPDX-License-Identifier: Apache-2.0
//
// Shared memory to sums: the stages of a tile, one after the other. Per step of 16 k: fragments of
// lhs by ldmatrix, codes to weights in registers, mma.
#pragma once

#include "cuda/device/dequant.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/qmm_sm80/params.cuh"

namespace jaxlowbit::qmm_sm80 {

template <class I>
using Sums = float[kAtomsN][I::kTiles][4];

template <class I>
class StageMultiplier {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  __device__ StageMultiplier(const Params& p, const Tile& tile)
      : p_(p), cursor_(GroupCursor::At(p, tile.stage_begin * I::kBlockK)), loaded_(-1) {
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows_[atom].centre[h] = Centre<T, kBits>::Of(1 << (kBits - 1));
      }
    }
    // Lane i reads row i % 8 of matrix i / 8: of the tokens' tile i / 16, half i / 8 % 2 of a step.
    const int lane = threadIdx.x % 32;
    const int row = I::kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8;
    lhs_chunk_ = Keep(LhsChunk<I>(row, lane / 8 % 2) * kCopyBytes);
#pragma unroll
    for (int i = 0; i < kCodeChunks; ++i) {
      code_chunks_[i] = Keep(CodeChunk<I>(threadIdx.x * kCodeChunks + i) * kCopyBytes);
    }
  }

  __device__ void MultiplyNext(uint32_t slot, Sums<I>& sums) {
    const uint32_t scales = slot + p_.bytes.codes + p_.bytes.lhs;
    if (cursor_.group != loaded_) LoadRows(scales, cursor_.group);
    const int left = p_.group_size - cursor_.offset;  // k of the group in this stage and beyond
    if (kHasOneGroupForm && left >= I::kBlockK) {
      MultiplyAtoms<true>(slot, scales, left, sums);
    } else {
      MultiplyAtoms<false>(slot, scales, left, sums);
    }
    cursor_.AdvanceStage(p_);
  }

 private:
  static constexpr int kCodeChunks = kWordsPerStep<kBits>;  // of a lane, of an atom; 4 words each
  // A form for stages in one group, because a test between steps keeps them from overlapping. Large
  // tiles overlap within a step, and have no registers to spare for more.
  static constexpr bool kHasOneGroupForm = I::kTiles < 8;

  // What dequantization needs for the two rows g and g + 8 that a lane holds of one atom.
  struct RowPair {
    RowScale<T, S> scale[2];
    Centre<T, kBits> centre[2];
  };

  // Groups change at `group_end` and every group_size from there, unless there is one.
  template <bool kOneGroup>
  __device__ void MultiplyAtoms(uint32_t slot, uint32_t scales, int group_end, Sums<I>& sums) {
#pragma unroll
    for (int k_atom = 0; k_atom < I::kAtomsK; ++k_atom) {
      uint32_t codes[kAtomsN][kStepsPerAtom][kWordsPerStep<kBits>];
#pragma unroll
      for (int atom = 0; atom < kAtomsN; ++atom) {
        LoadCodes(slot + (atom * I::kAtomsK + k_atom) * kAtomBytes<kBits>, codes[atom]);
      }
#pragma unroll
      for (int i = 0; i < kStepsPerAtom; ++i) {
        const int step = k_atom * kStepsPerAtom + i;
        if (!kOneGroup && step > 0 && step * kStepK == group_end) {
          group_end += p_.group_size;
          LoadRows(scales, loaded_ + 1);
        }
        uint32_t weights[kAtomsN][4];
#pragma unroll
        for (int atom = 0; atom < kAtomsN; ++atom) {
          Unpack<T, kBits>(codes[atom][i], rows_[atom].centre, weights[atom]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            weights[atom][j] = rows_[atom].scale[j % 2].Apply(weights[atom][j]);
          }
        }
        MultiplyStep(slot + p_.bytes.codes, step, weights, sums);
      }
    }
  }

  // All tokens of one step, two tiles of the instruction at a time.
  __device__ void MultiplyStep(uint32_t lhs, int step, const uint32_t (&weights)[kAtomsN][4],
                               Sums<I>& sums) const {
    constexpr int kTogether = I::kTiles == 1 ? 1 : 2;
    // A step is two columns, and the permutation is an exclusive or of column numbers.
    const uint32_t chunk = lhs + (lhs_chunk_ ^ (step * 2 * kCopyBytes));
#pragma unroll
    for (int tile = 0; tile < I::kTiles; tile += kTogether) {
      uint32_t fragments[2 * kTogether];
      LoadMatrices(fragments, chunk + tile * 8 * I::kLhsChunks * kCopyBytes);
#pragma unroll
      for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          Mma<T>(sums[atom][tile + i], weights[atom], fragments[2 * i], fragments[2 * i + 1]);
        }
      }
    }
  }

  __device__ void LoadRows(uint32_t scales, int group) {
    loaded_ = group;
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
      const int position =
          (atom * p_.groups_per_stage + group - cursor_.group) * static_cast<int>(kAtom) +
          threadIdx.x / 4 * 2;  // GroupPosition of row g
      RowScale<T, S>::LoadPair(scales + position * sizeof(S), rows_[atom].scale);
      if (p_.zero == nullptr) continue;
      const uint32_t zeros = LoadShared2(scales + p_.bytes.scales + position);
      rows_[atom].centre[0] = Centre<T, kBits>::Of(zeros & 255);
      rows_[atom].centre[1] = Centre<T, kBits>::Of(zeros >> 8);
    }
  }

  __device__ void LoadCodes(uint32_t atom,
                            uint32_t (&codes)[kStepsPerAtom][kWordsPerStep<kBits>]) const {
#pragma unroll
    for (int i = 0; i < kCodeChunks; ++i) {
      const uint4 words = LoadShared16(atom + code_chunks_[i]);
      const uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        codes[(4 * i + j) / kCodeChunks][(4 * i + j) % kCodeChunks] = four[j];
      }
    }
  }

  const Params& p_;
  GroupCursor cursor_;            // of the next stage's first k
  int loaded_;                    // group that rows_ holds
  int lhs_chunk_;                 // of the first step, in bytes
  int code_chunks_[kCodeChunks];  // of this thread in an atom, in bytes
  RowPair rows_[kAtomsN];
};

}  // namespace jaxlowbit::qmm_sm80
