// SPDX-License-Identifier: Apache-2.0
//
// Copies the stages of a tile of the transposed product from global to shared memory with cp.async.
#pragma once

#include "cuda/kernels/sm80/fill_lhs.cuh"

namespace jaxlowbit::sm80 {

template <class I>
class TransposedCopier {
 public:
  __device__ TransposedCopier(const Params& p, const Tile& tile)
      : p_(p), lhs_(p, tile), n_block_(tile.stage_begin * I::kAtomsK) {
    const int64_t strip = tile.weight * p.n_blocks + n_block_;
    packed_ = reinterpret_cast<const uint8_t*>(p.packed) +
              (strip * p.k_blocks + tile.block) * kAtomBytes<I::kBits> + threadIdx.x * kCopyBytes;
    first_group_ = tile.block * static_cast<int>(kAtom) / p.group_size;
    scales_ = Locate(p.scale, strip, sizeof(typename I::S));
    zeros_ = Locate(p.zero, strip, max(p.zero_bytes, 1));
  }

  __device__ void CopyNext(uint32_t slot) {
    CopyPacked(slot);
    lhs_.CopyNext(slot + p_.bytes.packed);
    const uint32_t groups = slot + p_.bytes.packed + p_.bytes.lhs + threadIdx.x * kCopyBytes;
    CopyGroups(scales_, groups, sizeof(typename I::S));
    if (p_.zero != nullptr) CopyGroups(zeros_, groups + p_.bytes.scales, p_.zero_bytes);
    n_block_ += I::kAtomsK;
  }

 private:
  static constexpr int kChunksPerAtom = kAtomBytes<I::kBits> / kCopyBytes;
  static_assert(I::kAtomsK * static_cast<int>(kAtom) / kMinGroupSize * static_cast<int>(kAtom) * 4 /
                        kCopyBytes <=
                    kThreads,
                "a thread copies at most one chunk of scales");

  // This thread's chunk of the scales or zeros of a stage, stored [atom][group][64].
  struct GroupChunk {
    const uint8_t* source;
    int atom;  // kNone: the thread has no such chunk
    bool exists;
  };

  __device__ GroupChunk Locate(const void* base, int64_t strip, int element_bytes) const {
    const int per_group = static_cast<int>(kAtom) * element_bytes / kCopyBytes;
    const int per_atom = p_.groups_per_stage * per_group;
    const int chunk = threadIdx.x, atom = chunk / per_atom;
    if (atom >= I::kAtomsK) return {nullptr, kNone, false};
    const int64_t first = (strip + atom) * p_.groups + first_group_;
    return {static_cast<const uint8_t*>(base) + first * kAtom * element_bytes +
                chunk % per_atom * kCopyBytes,
            atom, first_group_ + chunk % per_atom / per_group < p_.groups};
  }

  __device__ void CopyPacked(uint32_t shared) {
    const int64_t strip_bytes = int64_t{p_.k_blocks} * kAtomBytes<I::kBits>;
#pragma unroll
    for (int atom = 0; atom < I::kAtomsK; ++atom) {
#pragma unroll
      for (int i = 0; i < kChunksPerAtom; i += kThreads) {
        if (i + kThreads > kChunksPerAtom && i + static_cast<int>(threadIdx.x) >= kChunksPerAtom) {
          break;
        }
        const int chunk = atom * kChunksPerAtom + i + threadIdx.x;
        CopyPackedChunk<I>(p_, shared, chunk, packed_ + i * kCopyBytes,
                           n_block_ + atom < p_.n_blocks);
      }
      packed_ += strip_bytes;
    }
  }

  __device__ void CopyGroups(GroupChunk& chunk, uint32_t target, int element_bytes) const {
    if (chunk.atom >= I::kAtomsK) return;
    CopyGroupChunk(p_, target, chunk.source, chunk.exists && n_block_ + chunk.atom < p_.n_blocks);
    chunk.source += int64_t{I::kAtomsK} * p_.groups * kAtom * element_bytes;
  }

  const Params& p_;
  LhsCopier<I> lhs_;
  int n_block_;  // first of the next stage
  int first_group_;
  const uint8_t* packed_;
  GroupChunk scales_, zeros_;
};

}  // namespace jaxlowbit::sm80
