// SPDX-License-Identifier: Apache-2.0
//
// Multiplies the stages of a tile: shared memory to accumulators. A warp multiplies its 16 channels of every atom of a
// stage, transposed in registers.
#pragma once

#include "cuda/device/mma.cuh"
#include "cuda/kernels/sm80/weights.cuh"

namespace jaxlowbit::sm80 {

// [step of 16 k][tile of 8 rows][register].
template <class I>
using TransposedAccumulators = float[kStepsPerAtom][I::kTiles][4];

template <class I>
class TransposedMultiplier {
 public:
  using T = typename I::T;

  __device__ TransposedMultiplier(const Params& p, const Tile& tile) : p_(p) {
    StartRows(p.zero_bytes > 1, Table<I::kCodebook>(p.table), rows_);
    const int64_t k = tile.block * kAtom;
    group_left_ = static_cast<int>(p.group_size - k % p.group_size);
    // ldmatrix: lane i passes row i % 8 of matrix i / 8, which is half i / 8 % 2 of the warp's 16 columns of an atom,
    // of row tile i / 16.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = I::kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8;
    lhs_chunk_ = Opaque(LhsChunk<I>(row, warp * 2 + lane / 8 % 2) * kCopyBytes);
  }

  __device__ void MultiplyNext(uint32_t slot, TransposedAccumulators<I>& acc) {
    if (group_left_ >= kAtom) {
      MultiplyAtoms<true>(slot, acc);
    } else {
      MultiplyAtoms<false>(slot, acc);
    }
  }

 private:
  template <bool kOneGroup>
  __device__ void MultiplyAtoms(uint32_t slot, TransposedAccumulators<I>& acc) {
    const uint32_t scales = slot + p_.bytes.packed + p_.bytes.lhs;
#pragma unroll
    for (int atom = 0; atom < I::kAtomsK; ++atom) {
      uint32_t packed[I::kBits];
      packed_.Load(slot + atom * kAtomBytes<I::kBits>, packed);
      uint32_t fragments[I::kTiles][2];
      LoadLhs(slot + p_.bytes.packed, atom, fragments);
      int position = atom * p_.groups_per_stage;
      int group_end = group_left_;
      LoadRows<I>(p_, scales, position, rows_);
#pragma unroll
      for (int step = 0; step < kStepsPerAtom; ++step) {
        if (!kOneGroup && step > 0 && step * kStepK == group_end) {
          group_end += p_.group_size;
          LoadRows<I>(p_, scales, ++position, rows_);
        }
        uint32_t weights[4];
        rows_.Dequantize(packed, step, weights);
        const uint32_t turned[4] = {Transpose8x8(weights[0]), Transpose8x8(weights[2]),
                                    Transpose8x8(weights[1]), Transpose8x8(weights[3])};
#pragma unroll
        for (int tile = 0; tile < I::kTiles; ++tile) {
          Mma<T>(acc[step][tile], turned, fragments[tile][0], fragments[tile][1]);
        }
      }
    }
  }

  // Loads all rows of this warp's 16 columns of an atom.
  __device__ void LoadLhs(uint32_t lhs, int atom, uint32_t (&fragments)[I::kTiles][2]) const {
    constexpr int kColumnsPerAtom = static_cast<int>(kAtom) * 2 / kCopyBytes;
    const uint32_t chunk = lhs + (lhs_chunk_ ^ (atom * kColumnsPerAtom * kCopyBytes));
    if constexpr (I::kTiles == 1) {
      LoadMatrices(fragments[0], chunk);
    } else {
#pragma unroll
      for (int tile = 0; tile < I::kTiles; tile += 2) {
        uint32_t four[4];
        LoadMatrices(four, chunk + tile * 8 * I::kLhsChunks * kCopyBytes);
        fragments[tile][0] = four[0], fragments[tile][1] = four[1];
        fragments[tile + 1][0] = four[2], fragments[tile + 1][1] = four[3];
      }
    }
  }

  const Params& p_;
  PackedLoader<I> packed_;
  Rows<I> rows_;
  int group_left_;  // from the tile's first k to the end of its group
  int lhs_chunk_;   // of the first atom, in bytes
};

}  // namespace jaxlowbit::sm80
