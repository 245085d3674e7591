// SPDX-License-Identifier: Apache-2.0
//
// Global to shared memory: the stages of a tile, one after the other, by cp.async. Every thread
// copies the same chunks of every stage, so that addresses are worked out once and then advance.
#pragma once

#include "cuda/qmm_sm80/params.cuh"

namespace jaxlowbit::qmm_sm80 {

template <class I>
class StageCopier {
 public:
  using T = typename I::T;
  using S = typename I::S;

  __device__ StageCopier(const Params& p, const Tile& tile)
      : p_(p),
        k_block_(tile.stage_begin * I::kAtomsK),
        cursor_(GroupCursor::At(p, tile.stage_begin * I::kBlockK)) {
    const int64_t strip = tile.weight * p.n_blocks + tile.n_block;
    atoms_n_ = min(kAtomsN, p.n_blocks - tile.n_block);
#pragma unroll
    for (int n = 0; n < kAtomsN; ++n) {
      codes_[n] = reinterpret_cast<const uint8_t*>(p.packed) +
                  ((strip + n) * p.k_blocks + k_block_) * kAtomBytes<I::kBits> +
                  threadIdx.x * kCopyBytes;
    }

    const int row = threadIdx.x / I::kLhsChunks, column = threadIdx.x % I::kLhsChunks;
    const int64_t k = tile.stage_begin * I::kBlockK + column * kLhsPerChunk;
    lhs_ = static_cast<const T*>(p.lhs) + (tile.batch * p.m + tile.m0 + row) * p.k + k;
    lhs_left_ = static_cast<int>(p.k - k);
    int rows = 0;
    for (int i = 0; i < kLhsCopies; ++i) {
      rows |= tile.m0 + row + i * kRows < p.m ? 1 << i : 0;
    }
    lhs_rows_ = Keep(rows);
    lhs_target_ = Keep(LhsChunk<I>(row, column) * kCopyBytes);

#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      scales_[i] = Locate(p.scale, strip, threadIdx.x + i * kThreads, sizeof(S));
    }
    zeros_ = Locate(p.zero, strip, threadIdx.x, 1);
  }

  // Starts copying the next stage into `slot`.
  __device__ void CopyNext(uint32_t slot) {
    CopyCodes(slot);
    CopyLhs(slot + p_.bytes.codes);
    CopyGroups(slot + p_.bytes.codes + p_.bytes.lhs);
    k_block_ += I::kAtomsK;
    cursor_.AdvanceStage(p_);
  }

 private:
  static constexpr int kLhsPerChunk = kCopyBytes / 2;
  static constexpr int kRows = kThreads / I::kLhsChunks;  // of lhs, copied at a time
  static constexpr int kLhsCopies = (I::kBlockM + kRows - 1) / kRows;
  static constexpr int kChunksPerAtom = kAtomBytes<I::kBits> / kCopyBytes;
  // Chunks of scales with the smallest groups, over the threads.
  static constexpr int kScaleCopies =
      (kBlockN * (I::kBlockK / kMinGroupSize) * static_cast<int>(sizeof(S)) / kCopyBytes +
       kThreads - 1) /
      kThreads;
  static_assert(kRows % 8 == 0, "a thread's rows of lhs must share their permutation");
  static_assert(kBlockN * (I::kBlockK / kMinGroupSize) / kCopyBytes <= kThreads,
                "a thread copies one chunk of zeros");

  // One chunk of the scales or zeros of a stage, stored [atom][group][64].
  struct GroupChunk {
    const uint8_t* source;  // of a stage that begins with group 0
    int group;              // counted from the stage's first; INT_MAX / 2: not this thread's
  };

  __device__ GroupChunk Locate(const void* base, int64_t strip, int chunk,
                               int element_bytes) const {
    const int per_group = static_cast<int>(kAtom) * element_bytes / kCopyBytes;
    const int per_atom = p_.groups_per_stage * per_group;
    const int atom = chunk / per_atom;
    if (atom >= atoms_n_) return {nullptr, INT_MAX / 2};
    const int64_t offset = (strip + atom) * p_.groups * kAtom * element_bytes;
    return {static_cast<const uint8_t*>(base) + offset + chunk % per_atom * kCopyBytes,
            chunk % per_atom / per_group};
  }

  // The atoms of a stage along k follow each other in global memory as in the slot.
  __device__ void CopyCodes(uint32_t shared) {
#pragma unroll
    for (int n = 0; n < kAtomsN; ++n) {
#pragma unroll
      for (int i = 0; i < I::kAtomsK * kChunksPerAtom; i += kThreads) {
        const int chunk = n * I::kAtomsK * kChunksPerAtom + i + threadIdx.x;
        const int atom = static_cast<int>((i + threadIdx.x) / kChunksPerAtom);
        const bool valid = n < atoms_n_ && (I::kAtomsK == 1 || k_block_ + atom < p_.k_blocks);
        CopyAsync(shared + CodeChunk<I>(chunk) * kCopyBytes, codes_[n] + i * kCopyBytes, valid);
      }
      codes_[n] += I::kAtomsK * kAtomBytes<I::kBits>;
    }
  }

  __device__ void CopyLhs(uint32_t shared) {
    constexpr int kBytes = kRows * I::kLhsChunks * kCopyBytes;  // between a thread's copies
    // With more threads than chunks, the last threads have none.
    const bool mine = kRows <= I::kBlockM || lhs_target_ < I::kBlockM * I::kLhsChunks * kCopyBytes;
    if (!mine) {
    } else if (p_.lhs_aligned) {
#pragma unroll
      for (int i = 0; i < kLhsCopies; ++i) {
        CopyAsync(shared + lhs_target_ + i * kBytes, lhs_ + i * kRows * p_.k,
                  (lhs_rows_ >> i & 1) != 0 && lhs_left_ > 0);
      }
    } else {
#pragma unroll 1  // rare: without its registers the common path has enough
      for (int i = 0; i < kLhsCopies * kLhsPerChunk; ++i) {
        const int copy = i / kLhsPerChunk, element = i % kLhsPerChunk;
        const bool valid = (lhs_rows_ >> copy & 1) != 0 && element < lhs_left_;
        StoreShared2(shared + lhs_target_ + copy * kBytes + element * 2,
                     valid ? lhs_ + copy * kRows * p_.k + element : nullptr);
      }
    }
    lhs_ += I::kBlockK;
    lhs_left_ -= I::kBlockK;
  }

  __device__ void CopyGroups(uint32_t shared) {
    const auto copy = [&](const GroupChunk& chunk, uint32_t target, int element_bytes) {
      if (chunk.group >= p_.groups_per_stage) return;
      CopyAsync(target, chunk.source + int64_t{cursor_.group} * kAtom * element_bytes,
                cursor_.group + chunk.group < p_.groups);
    };
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      copy(scales_[i], shared + (threadIdx.x + i * kThreads) * kCopyBytes, sizeof(S));
    }
    if (p_.zero != nullptr) copy(zeros_, shared + p_.bytes.scales + threadIdx.x * kCopyBytes, 1);
  }

  const Params& p_;
  int k_block_;         // first of the next stage
  GroupCursor cursor_;  // of its first k
  int atoms_n_;         // of the tile that exist
  const uint8_t* codes_[kAtomsN];
  const T* lhs_;
  int lhs_left_;  // elements from lhs_ to the end of its row
  int lhs_rows_;  // bit i: row i * kRows after this thread's first exists
  int lhs_target_;
  GroupChunk scales_[kScaleCopies], zeros_;
};

}  // namespace jaxlowbit::qmm_sm80
