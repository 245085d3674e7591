// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm80_transposed: out[b, i, k] = sum_n lhs[b, i, n] * w[k, n] of weight index[b], from the same
// packed words as qmm_sm80: the cotangent of lhs. Everything that is said there of formats, types
// and rounding holds here.
//
// Decomposition. A CTA owns kBlockM tokens x one atom of 64 k, of one of split_k ranges of n. A stage
// is one or two atoms that follow each other along n. Warp w owns rows 16 w .. 16 w + 15 of n of
// each atom, as the packed order has it, so the four warps sum over different n and add up at the
// end, in shared memory.
//
// Transposition. Dequantized registers are 8 x 8 blocks with n along the lanes; the instruction wants
// k there. movmatrix turns a block in one instruction, and operand A of the transposed weights is the
// four turned blocks with the middle two exchanged.
//
// Pipeline. That of qmm_sm80 (RunStages), with n in the place of k.

#include "cuda/device/dependency.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/kernels.h"
#include "cuda/qmm_sm80/copy_lhs.cuh"
#include "cuda/qmm_sm80/launch.cuh"
#include "cuda/qmm_sm80/weights.cuh"

namespace jaxlowbit {
namespace qmm_sm80 {
namespace {

// [step of 16 k][tile of 8 tokens][register].
template <class I>
using TransposedSums = float[kStepsPerAtom][I::kTiles][4];

template <class I>
class TransposedCopier {
 public:
  __device__ TransposedCopier(const Params& p, const Tile& tile)
      : p_(p), lhs_(p, tile), n_block_(tile.stage_begin * I::kAtomsK) {
    const int64_t strip = tile.weight * p.n_blocks + n_block_;
    codes_ = reinterpret_cast<const uint8_t*>(p.packed) +
             (strip * p.k_blocks + tile.block) * kAtomBytes<I::kBits> + threadIdx.x * kCopyBytes;
    first_group_ = tile.block * static_cast<int>(kAtom) / p.group_size;
    scales_ = Locate(p.scale, strip, sizeof(typename I::S));
    zeros_ = Locate(p.zero, strip, max(p.zero_bytes, 1));
  }

  __device__ void CopyNext(uint32_t slot) {
    CopyCodes(slot);
    lhs_.CopyNext(slot + p_.bytes.codes);
    const uint32_t groups = slot + p_.bytes.codes + p_.bytes.lhs + threadIdx.x * kCopyBytes;
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
    int atom;  // INT_MAX / 2: none
    bool exists;
  };

  __device__ GroupChunk Locate(const void* base, int64_t strip, int element_bytes) const {
    const int per_group = static_cast<int>(kAtom) * element_bytes / kCopyBytes;
    const int per_atom = p_.groups_per_stage * per_group;
    const int chunk = threadIdx.x, atom = chunk / per_atom;
    if (atom >= I::kAtomsK) return {nullptr, INT_MAX / 2, false};
    const int64_t first = (strip + atom) * p_.groups + first_group_;
    return {static_cast<const uint8_t*>(base) + first * kAtom * element_bytes +
                chunk % per_atom * kCopyBytes,
            atom, first_group_ + chunk % per_atom / per_group < p_.groups};
  }

  __device__ void CopyCodes(uint32_t shared) {
    const int64_t strip_bytes = int64_t{p_.k_blocks} * kAtomBytes<I::kBits>;
#pragma unroll
    for (int atom = 0; atom < I::kAtomsK; ++atom) {
#pragma unroll
      for (int i = 0; i < kChunksPerAtom; i += kThreads) {
        const int chunk = atom * kChunksPerAtom + i + threadIdx.x;
        CopyCodeChunk<I>(p_, shared, chunk, codes_ + i * kCopyBytes, n_block_ + atom < p_.n_blocks);
      }
      codes_ += strip_bytes;
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
  const uint8_t* codes_;
  GroupChunk scales_, zeros_;
};

template <class I>
class TransposedMultiplier {
 public:
  using T = typename I::T;

  __device__ TransposedMultiplier(const Params& p, const Tile& tile) : p_(p) {
    rows_.Start(p.zero_bytes > 1);
    const int64_t k = tile.block * kAtom;
    group_left_ = static_cast<int>(p.group_size - k % p.group_size);
    // Lane i reads row i % 8 of matrix i / 8: of the tokens' tile i / 16, half i / 8 % 2 of the
    // warp's 16 columns of an atom.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = I::kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8;
    lhs_chunk_ = Keep(LhsChunk<I>(row, warp * 2 + lane / 8 % 2) * kCopyBytes);
  }

  __device__ void MultiplyNext(uint32_t slot, TransposedSums<I>& sums) {
    if (group_left_ >= kAtom) {
      MultiplyAtoms<true>(slot, sums);
    } else {
      MultiplyAtoms<false>(slot, sums);
    }
  }

 private:
  template <bool kOneGroup>
  __device__ void MultiplyAtoms(uint32_t slot, TransposedSums<I>& sums) {
    const uint32_t scales = slot + p_.bytes.codes + p_.bytes.lhs;
#pragma unroll
    for (int atom = 0; atom < I::kAtomsK; ++atom) {
      uint32_t codes[kStepsPerAtom][kWordsPerStep<I::kBits>];
      codes_.Load(slot + atom * kAtomBytes<I::kBits>, codes);
      uint32_t fragments[I::kTiles][2];
      LoadLhs(slot + p_.bytes.codes, atom, fragments);
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
        rows_.Dequantize(codes[step], weights);
        const uint32_t turned[4] = {Transpose8x8(weights[0]), Transpose8x8(weights[2]),
                                    Transpose8x8(weights[1]), Transpose8x8(weights[3])};
#pragma unroll
        for (int tile = 0; tile < I::kTiles; ++tile) {
          Mma<T>(sums[step][tile], turned, fragments[tile][0], fragments[tile][1]);
        }
      }
    }
  }

  // This warp's 16 columns of an atom, of all tokens.
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
  CodeLoader<I> codes_;
  Rows<I> rows_;
  int group_left_;  // k from the tile's first to the end of its group
  int lhs_chunk_;   // of the first atom, in bytes
};

template <class I>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(I::kBlockM, 8))
    QmmSm80TransposedKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t ring[];  // [kStages][slot_bytes]
  const Tile tile = OwnTile<I>(p, 1);
  TransposedCopier<I> copier(p, tile);
  TransposedMultiplier<I> multiplier(p, tile);
  TransposedSums<I> sums = {};
  RunStages<I>(p, tile, Keep(SharedAddress(ring)), copier, multiplier, sums);
  LaunchDependents();

  // [warp][step][tile][register][lane]: neighbours in a row, no bank conflicts.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* partial = reinterpret_cast<float*>(ring);
  const auto at = [&](int from, int step, int mma, int i) -> float& {
    return partial[(((from * kStepsPerAtom + step) * I::kTiles + mma) * 4 + i) * 32 + lane];
  };
  // All warps are done with the ring.
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
    for (int mma = 0; mma < I::kTiles; ++mma) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at(warp, step, mma, i) = sums[step][mma][i];
    }
  }
  // The sums of all warps are there; warp w adds those of step w.
  __syncthreads();
  for (int mma = 0; mma < I::kTiles; ++mma) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = at(0, warp, mma, i);
#pragma unroll
      for (int from = 1; from < kWarpsPerAtom; ++from) sum += at(from, warp, mma, i);
      const int64_t m = tile.m0 + mma * 8 + lane % 4 * 2 + i % 2;
      const int64_t k = tile.block * kAtom + warp * kStepK + i / 2 * 8 + lane / 4;
      StoreOut<typename I::T>(p, tile, m, k, sum);
    }
  }
}

struct Transposed {
  template <class I>
  static constexpr KernelFunction kKernel = QmmSm80TransposedKernel<I>;
};

}  // namespace
}  // namespace qmm_sm80

cudaError_t InitializeQmmSm80Transposed() { return qmm_sm80::Initialize<qmm_sm80::Transposed>(); }

cudaError_t LaunchQmmSm80Transposed(const QuantizedMatmul& problem, const Buffers& buffers,
                                    const Choice& choice, cudaStream_t stream) {
  const qmm_sm80::KernelFunction kernel =
      qmm_sm80::Find<qmm_sm80::Transposed>(problem, choice.block_m);
  return qmm_sm80::Launch(kernel, problem, buffers, choice, stream);
}

}  // namespace jaxlowbit
