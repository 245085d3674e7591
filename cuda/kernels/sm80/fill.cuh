// SPDX-License-Identifier: Apache-2.0
//
// Copies the stages of a tile from global to shared memory with cp.async. Every thread copies the same chunks of every
// stage, so addresses are computed once and then advance.
#pragma once

#include "cuda/kernels/sm80/fill_lhs.cuh"

namespace jaxlowbit::sm80 {

template <class I>
class StageCopier {
 public:
  using S = typename I::S;

  __device__ StageCopier(const Params& p, const Tile& tile)
      : p_(p),
        lhs_(p, tile),
        k_block_(tile.stage_begin * I::kAtomsK),
        cursor_(GroupCursor::At(p, tile.stage_begin * I::kBlockK)) {
    const bool gated = p.epilogue.gated;
    const int64_t strip = tile.weight * p.n_blocks + tile.block;
    strip_step_ = gated ? (tile.up - tile.weight) * p.n_blocks : 1;
    atoms_n_ = gated ? kAtomsN : min(kAtomsN, p.n_blocks - tile.block);
#pragma unroll
    for (int n = 0; n < kAtomsN; ++n) {
      packed_[n] = reinterpret_cast<const uint8_t*>(p.packed) +
                   ((strip + n * strip_step_) * p.k_blocks + k_block_) * kAtomBytes<I::kBits> +
                   threadIdx.x * kCopyBytes;
    }
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      scales_[i] = Locate(p.scale, strip, threadIdx.x + i * kThreads, sizeof(S));
      zeros_[i] = Locate(p.zero, strip, threadIdx.x + i * kThreads, max(p.zero_bytes, 1));
    }
  }

  // Starts copying the next stage into `slot`.
  __device__ void CopyNext(uint32_t slot) {
    CopyPacked(slot);
    lhs_.CopyNext(slot + p_.bytes.packed);
    CopyGroups(slot + p_.bytes.packed + p_.bytes.lhs);
    k_block_ += I::kAtomsK;
    cursor_.AdvanceStage(p_);
  }

 private:
  static constexpr int kChunksPerAtom = kAtomBytes<I::kBits> / kCopyBytes;
  static constexpr int kChunks = I::kAtomsK * kChunksPerAtom;  // of a strip in a stage
  // Chunks of scales, or of zeros, per thread with the smallest groups.
  static constexpr int kScaleCopies =
      (kBlockN * (I::kBlockK / kMinGroupSize) * static_cast<int>(sizeof(S)) / kCopyBytes +
       kThreads - 1) /
      kThreads;

  // One chunk of the scales or zeros of a stage, stored [atom][group][64].
  struct GroupChunk {
    const uint8_t* source;  // address for a stage that begins with group 0
    int group;              // counted from the stage's first; kNone: the thread has no such chunk
  };

  __device__ GroupChunk Locate(const void* base, int64_t strip, int chunk,
                               int element_bytes) const {
    const int per_group = static_cast<int>(kAtom) * element_bytes / kCopyBytes;
    const int per_atom = p_.groups_per_stage * per_group;
    const int atom = chunk / per_atom;
    if (atom >= atoms_n_) return {nullptr, kNone};
    const int64_t offset = (strip + atom * strip_step_) * p_.groups * kAtom * element_bytes;
    return {static_cast<const uint8_t*>(base) + offset + chunk % per_atom * kCopyBytes,
            chunk % per_atom / per_group};
  }

  // The atoms of a stage along k are contiguous in global memory, as in the slot.
  __device__ void CopyPacked(uint32_t shared) {
#pragma unroll
    for (int n = 0; n < kAtomsN; ++n) {
#pragma unroll
      for (int i = 0; i < kChunks; i += kThreads) {
        if (i + kThreads > kChunks && i + static_cast<int>(threadIdx.x) >= kChunks) break;
        const int chunk = n * kChunks + i + threadIdx.x;
        const int atom = static_cast<int>((i + threadIdx.x) / kChunksPerAtom);
        const bool valid = n < atoms_n_ && (I::kAtomsK == 1 || k_block_ + atom < p_.k_blocks);
        CopyPackedChunk<I>(p_, shared, chunk, packed_[n] + i * kCopyBytes, valid);
      }
      packed_[n] += I::kAtomsK * kAtomBytes<I::kBits>;
    }
  }

  __device__ void CopyGroups(uint32_t shared) {
    const auto copy = [&](const GroupChunk& chunk, uint32_t target, int element_bytes) {
      if (chunk.group >= p_.groups_per_stage) return;
      CopyGroupChunk(p_, target, chunk.source + int64_t{cursor_.group} * kAtom * element_bytes,
                     cursor_.group + chunk.group < p_.groups);
    };
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      const uint32_t target = shared + (threadIdx.x + i * kThreads) * kCopyBytes;
      copy(scales_[i], target, sizeof(S));
      if (p_.zero != nullptr) copy(zeros_[i], target + p_.bytes.scales, p_.zero_bytes);
    }
  }

  const Params& p_;
  LhsCopier<I> lhs_;
  int k_block_;         // first of the next stage
  GroupCursor cursor_;  // at the first k of the next stage
  int atoms_n_;         // atoms of the tile that exist
  int64_t strip_step_;  // between the strips of consecutive atoms
  const uint8_t* packed_[kAtomsN];
  GroupChunk scales_[kScaleCopies], zeros_[kScaleCopies];
};

}  // namespace jaxlowbit::sm80
