// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm80: out[b, i, n] = sum_k lhs[b, i, k] * w[k, n] of weight index[b], with
// w = round((q[k, n] - z[k / group_size, n]) * scale[k / group_size, n]) in 4 or 8 bits, bf16 or
// f16 lhs, float32 accumulation; compute capability 8.0 and up, every m.
//
// Bound. A 4-bit weight is half a byte and costs 2 m FLOP. At 200 FLOP per byte of memory traffic
// (H200, bf16) the product is a stream of codes up to m = 50: the ring below keeps loads in flight,
// and dequantization (2 instructions per weight, device/dequant.cuh) must hide under them.
//
// Decomposition. Weights are operand A of the instruction (16 output channels), tokens operand B
// (8).
//
//               n ──►   kBlockN = 2 atoms
//             ┌─────────┬─────────┐
//        m    │  CTA 0  │  CTA 2  │   A CTA owns kBlockM tokens x kBlockN channels of one of
//        split_k │    ├─────────┼─────────┤   ranges of k. Warp w owns rows 16 w .. 16 w + 15 of
//        both atoms, ▼    │  CTA 1  │  CTA 3  │   so a weight is read and dequantized by exactly
//        one warp.
//             └─────────┴─────────┘
//
// Storage. Codes are packed so that a lane's registers for an atom are consecutive words
// (device/layout.cuh): they go from global memory to fragments without being rearranged.
//
// Pipeline.   copy stage t + kStages - 1 ─┐              (cp.async, into the slot of stage t - 1)
//             wait for stage t ─► lhs fragments, codes ─► dequantize ─► mma     (per step of 16 k)
//
// With split_k > 1 a CTA leaves float32 partial sums in the workspace and reduce_splits.cu adds
// them in a fixed order, so that results are the same bits every time.
//
// Limits: Unsupported() in dispatch.cc. Rows of lhs that are not 16-byte aligned (k % 8 != 0) are
// copied element by element; everything else about k, m and n is handled by predicates.

#include <climits>

#include "cuda/device/copy.cuh"
#include "cuda/device/dependency.cuh"
#include "cuda/device/dequant.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/kernels.h"
#include "cuda/qmm_sm80.h"

namespace jaxlowbit {
namespace {

using qmm_sm80::kBlockN;
using qmm_sm80::StageBytes;

constexpr int kThreads = 32 * kWarpsPerAtom;
constexpr int kAtomsN = kBlockN / kAtom;
template <int kBits>
constexpr int kBlockK = qmm_sm80::BlockK(kBits);
template <int kBits>
constexpr int kAtomsK = kBlockK<kBits> / kAtom;
template <int kBlockM, int kBits>
constexpr int kNumStages = qmm_sm80::NumStages(kBlockM, kBits);
// 16-byte chunks of a row of lhs in a stage.
template <int kBits>
constexpr int kLhsChunks = kBlockK<kBits> * 2 / kCopyBytes;

// The problem as the kernel reads it.
struct Params {
  const void* lhs;
  const uint32_t* packed;
  const void* scale;
  const uint8_t* zero;   // null: zero point 2^(bits - 1)
  const int32_t* index;  // null: weight min(b, num_weights - 1)
  void* out;             // or the workspace, when split_k > 1
  int64_t batch, num_weights, m, n, k;
  int64_t m_tiles, n_tiles;
  int n_blocks, k_blocks, groups;
  int group_size;                // INT_MAX for one group
  int block_groups, block_rest;  // k of a stage = block_groups * group_size + block_rest
  int groups_per_stage;
  int split_k;
  bool out_float;  // float32 out; else the type of lhs
  bool lhs_aligned;
  StageBytes bytes;
  int slot_bytes;  // bytes.total()
};

// The part of the product that a CTA owns.
struct Tile {
  int64_t m0;      // first token
  int64_t batch;   // position in the batch
  int64_t weight;  // which of the packed weights
  int split;
  int n_block;                 // first atom along n
  int stage_begin, stage_end;  // range of k in stages
};

template <int kBlockM, int kBits>
__device__ Tile OwnTile(const Params& p) {
  Tile tile;
  // Tokens vary fastest: CTAs that share weights run together and find them in L2.
  int64_t i = blockIdx.x;
  tile.m0 = i % p.m_tiles * kBlockM;
  i /= p.m_tiles;
  tile.n_block = static_cast<int>(i % p.n_tiles) * kAtomsN;
  i /= p.n_tiles;
  tile.split = static_cast<int>(i % p.split_k);
  tile.batch = i / p.split_k;
  const int64_t asked = p.index == nullptr ? tile.batch : p.index[tile.batch];
  tile.weight = min(max(asked, int64_t{0}), p.num_weights - 1);
  const int stages = (p.k_blocks + kAtomsK<kBits> - 1) / kAtomsK<kBits>;
  const int per_split = (stages + p.split_k - 1) / p.split_k;
  tile.stage_begin = tile.split * per_split;
  tile.stage_end = min(stages, tile.stage_begin + per_split);
  return tile;
}

// Where a stage stands among the groups along k.
struct GroupCursor {
  int first;   // group of the stage's first k
  int offset;  // of that k in its group

  template <int kBits>
  static __device__ GroupCursor At(const Params& p, int stage) {
    const int k = stage * kBlockK<kBits>;
    return {k / p.group_size, k % p.group_size};
  }
  __device__ void Advance(const Params& p) {
    first += p.block_groups;
    offset += p.block_rest;
    if (offset >= p.group_size) {
      offset -= p.group_size;
      ++first;
    }
  }
};

// Lanes of one ldmatrix phase read the same 16-byte column of 8 rows; with whole-line rows they
// would meet in one bank group, so columns are permuted within each row.
template <int kBits>
__device__ int LhsChunk(int row, int column) {
  return row * kLhsChunks<kBits> + (column ^ (row % 8));
}

// A lane's codes of an 8-bit atom are two chunks; reading the first of both of lanes i and i + 4
// would meet in one bank group, so every other run of 8 chunks is swapped pairwise.
template <int kBits>
__device__ int CodeChunk(int chunk) {
  return kBits == 8 ? chunk ^ (chunk / 8 % 2) : chunk;
}

// Copies stages one after the other. Every thread copies the same chunks of every stage, so that
// addresses are worked out once.
template <typename T, typename S, int kBlockM, int kBits>
class StageCopier {
 public:
  __device__ StageCopier(const Params& p, const Tile& tile)
      : p_(p), groups_(GroupCursor::At<kBits>(p, tile.stage_begin)) {
    k_ = tile.stage_begin * kBlockK<kBits>;
    const int64_t strip = tile.weight * p.n_blocks + tile.n_block;
    atoms_n_ = min(kAtomsN, p.n_blocks - tile.n_block);
    weights_ = reinterpret_cast<const uint8_t*>(p.packed) +
               (strip * p.k_blocks + k_ / kAtom) * kAtomBytes<kBits> + threadIdx.x * kCopyBytes;

    const int row = threadIdx.x / kLhsChunks<kBits>, column = threadIdx.x % kLhsChunks<kBits>;
    lhs_rows_ = static_cast<int>(min(p.m - tile.m0, int64_t{kBlockM})) - row;
    lhs_column_ = column * kLhsPerChunk;
    lhs_ =
        static_cast<const T*>(p.lhs) + (tile.batch * p.m + tile.m0 + row) * p.k + lhs_column_ + k_;
    lhs_target_ = LhsChunk<kBits>(row, column) * kCopyBytes;

    const auto* scale = static_cast<const uint8_t*>(p.scale);
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      scales_[i] = Locate(strip, threadIdx.x + i * kThreads, sizeof(S));
      scales_[i].source += reinterpret_cast<uintptr_t>(scale);
    }
    zeros_ = Locate(strip, threadIdx.x, 1);
    zeros_.source += reinterpret_cast<uintptr_t>(p.zero);
  }

  // Starts copying the next stage into `slot`.
  __device__ void CopyNext(uint8_t* slot) {
    const uint32_t shared = SharedAddress(slot);
    CopyWeights(shared);
    CopyLhs(shared + p_.bytes.weights, slot + p_.bytes.weights);
    CopyGroups(shared + p_.bytes.weights + p_.bytes.lhs);
    k_ += kBlockK<kBits>;
    groups_.Advance(p_);
  }

 private:
  static constexpr int kLhsPerChunk = kCopyBytes / 2;
  // Chunks of scales with the smallest groups, over the threads.
  static constexpr int kScaleCopies = kBlockN * (kBlockK<kBits> / qmm_sm80::kMinGroupSize) *
                                                  static_cast<int>(sizeof(S)) / kCopyBytes >
                                              kThreads
                                          ? 2
                                          : 1;

  // One chunk of the scales or zeros of a stage, stored [atom][group][64].
  struct GroupChunk {
    uintptr_t source;  // of the stage that begins with group 0
    int group;         // counted from the stage's first; INT_MAX / 2: no chunk for this thread
  };

  __device__ GroupChunk Locate(int64_t strip, int chunk, int element_bytes) const {
    const int per_group = static_cast<int>(kAtom) * element_bytes / kCopyBytes;
    const int per_atom = p_.groups_per_stage * per_group;
    const int atom = chunk / per_atom;
    if (atom >= atoms_n_) return {0, INT_MAX / 2};
    return {static_cast<uintptr_t>((strip + atom) * p_.groups * kAtom * element_bytes +
                                   chunk % per_atom * kCopyBytes),
            chunk % per_atom / per_group};
  }

  __device__ void CopyWeights(uint32_t shared) {
    constexpr int kChunksPerAtom = kAtomBytes<kBits> / kCopyBytes;
    const int64_t strip_bytes = int64_t{p_.k_blocks} * kAtomBytes<kBits>;
#pragma unroll
    for (int n = 0; n < kAtomsN; ++n) {
#pragma unroll
      for (int k = 0; k < kAtomsK<kBits>; ++k) {
        const bool valid = n < atoms_n_ && (k == 0 || k_ / kAtom + k < p_.k_blocks);
        const int atom = (n * kAtomsK<kBits> + k) * kAtomBytes<kBits>;
        const uint8_t* source = weights_ + (n == 0 ? 0 : strip_bytes) + k * kAtomBytes<kBits>;
#pragma unroll
        for (int i = 0; i < kChunksPerAtom; i += kThreads) {
          CopyAsync(shared + atom + CodeChunk<kBits>(threadIdx.x + i) * kCopyBytes,
                    source + i * kCopyBytes, valid);
        }
      }
    }
    weights_ += kAtomsK<kBits> * kAtomBytes<kBits>;
  }

  __device__ void CopyLhs(uint32_t shared, uint8_t* generic) {
    constexpr int kRows = kThreads / kLhsChunks<kBits>;  // a multiple of 8: same permutation
    const int64_t left = p_.k - k_ - lhs_column_;
#pragma unroll
    for (int i = 0; i < kBlockM / kRows; ++i) {
      const int target = lhs_target_ + i * kRows * kLhsChunks<kBits> * kCopyBytes;
      const T* source = lhs_ + i * kRows * p_.k;
      const bool row_valid = i * kRows < lhs_rows_;
      if (p_.lhs_aligned) {
        CopyAsync(shared + target, source, row_valid && left > 0);
      } else {
        T* elements = reinterpret_cast<T*>(generic + target);
        for (int j = 0; j < kLhsPerChunk; ++j) {
          elements[j] = row_valid && j < left ? source[j] : T(0.0f);
        }
      }
    }
    lhs_ += kBlockK<kBits>;
  }

  __device__ void CopyGroups(uint32_t shared) {
    const auto copy = [&](const GroupChunk& chunk, uint32_t target, int element_bytes) {
      if (chunk.group >= p_.groups_per_stage) return;
      const uintptr_t source = chunk.source + int64_t{groups_.first} * kAtom * element_bytes;
      CopyAsync(target, reinterpret_cast<const void*>(source),
                groups_.first + chunk.group < p_.groups);
    };
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      copy(scales_[i], shared + (threadIdx.x + i * kThreads) * kCopyBytes, sizeof(S));
    }
    if (p_.zero != nullptr) copy(zeros_, shared + p_.bytes.scales + threadIdx.x * kCopyBytes, 1);
  }

  const Params& p_;
  int k_;  // first of the next stage
  GroupCursor groups_;
  int atoms_n_;  // of the tile that exist
  const uint8_t* weights_;
  const T* lhs_;
  int lhs_rows_, lhs_column_, lhs_target_;  // rows from this thread's first to the last
  GroupChunk scales_[kScaleCopies], zeros_;
};

template <int kBlockM>
using Sums = float[kAtomsN][kBlockM / 8][4];

// Multiplies stages one after the other into `sums`.
template <typename T, typename S, int kBlockM, int kBits>
class StageMultiplier {
 public:
  __device__ StageMultiplier(const Params& p, const Tile& tile)
      : p_(p), groups_(GroupCursor::At<kBits>(p, tile.stage_begin)), started_(false) {
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows_[atom].centre[h] = Centre<T, kBits>::Of(1 << (kBits - 1));
      }
    }
    // Lane i reads row i % 8 of matrix i / 8: of the tokens' tile i / 16, half i / 8 % 2 of a step.
    const int lane = threadIdx.x % 32;
    lhs_chunk_ = LhsChunk<kBits>(lane / 16 * 8 + lane % 8, lane / 8 % 2) * kCopyBytes;
  }

  __device__ void MultiplyNext(const uint8_t* slot, Sums<kBlockM>& sums) {
    const uint32_t lhs = SharedAddress(slot + p_.bytes.weights);
    const uint8_t* scales = slot + p_.bytes.weights + p_.bytes.lhs;
    if (groups_.offset == 0 || !started_) LoadRows(scales, 0);
    started_ = true;
    int group = 0;
    int group_end = p_.group_size - groups_.offset;  // k in this stage where the next one begins
#pragma unroll
    for (int k_atom = 0; k_atom < kAtomsK<kBits>; ++k_atom) {
      uint32_t codes[kAtomsN][kStepsPerAtom][kWordsPerStep<kBits>];
#pragma unroll
      for (int atom = 0; atom < kAtomsN; ++atom) {
        LoadCodes(slot + (atom * kAtomsK<kBits> + k_atom) * kAtomBytes<kBits>, codes[atom]);
      }
#pragma unroll
      for (int i = 0; i < kStepsPerAtom; ++i) {
        const int step = k_atom * kStepsPerAtom + i;
        if (step > 0 && step * kStepK == group_end) {
          group_end += p_.group_size;
          LoadRows(scales, ++group);
        }
        uint32_t fragments[kTiles][2];
        LoadLhs(lhs, step, fragments);
#pragma unroll
        for (int atom = 0; atom < kAtomsN; ++atom) {
          uint32_t weights[4];
          Unpack<T, kBits>(codes[atom][i], rows_[atom].centre, weights);
#pragma unroll
          for (int j = 0; j < 4; ++j) weights[j] = rows_[atom].scale[j % 2].Apply(weights[j]);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            Mma<T>(sums[atom][tile], weights, fragments[tile][0], fragments[tile][1]);
          }
        }
      }
    }
    groups_.Advance(p_);
  }

 private:
  static constexpr int kTiles = kBlockM / 8;

  // What dequantization needs for the two rows g and g + 8 that a lane holds of one atom.
  struct RowPair {
    RowScale<T, S> scale[2];
    Centre<T, kBits> centre[2];
  };

  __device__ void LoadRows(const uint8_t* scales, int group) {
    const uint8_t* zeros = scales + p_.bytes.scales;
#pragma unroll
    for (int atom = 0; atom < kAtomsN; ++atom) {
      const int position = (atom * p_.groups_per_stage + group) * static_cast<int>(kAtom) +
                           threadIdx.x / 4 * 2;  // GroupPosition of row g
      const S* scale = reinterpret_cast<const S*>(scales) + position;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows_[atom].scale[h] = RowScale<T, S>::Of(scale, h);
        if (p_.zero != nullptr) rows_[atom].centre[h] = Centre<T, kBits>::Of(zeros[position + h]);
      }
    }
  }

  static __device__ void LoadCodes(const uint8_t* source,
                                   uint32_t (&codes)[kStepsPerAtom][kWordsPerStep<kBits>]) {
    constexpr int kChunks = kWordsPerStep<kBits>;  // 4 words each
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = CodeChunk<kBits>(threadIdx.x * kChunks + i);
      const uint4 words = *reinterpret_cast<const uint4*>(source + chunk * kCopyBytes);
      const uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[(4 * i + j) / kChunks][(4 * i + j) % kChunks] = four[j];
    }
  }

  __device__ void LoadLhs(uint32_t lhs, int step, uint32_t (&fragments)[kTiles][2]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t four[4];
      // A step is two columns, and the permutation is an exclusive or of column numbers.
      const int chunk = lhs_chunk_ ^ (step * 2 * kCopyBytes);
      LoadMatrices(four, lhs + tile * 8 * kLhsChunks<kBits> * kCopyBytes + chunk);
      fragments[tile][0] = four[0], fragments[tile][1] = four[1];
      fragments[tile + 1][0] = four[2], fragments[tile + 1][1] = four[3];
    }
  }

  const Params& p_;
  GroupCursor groups_;
  bool started_;
  int lhs_chunk_;  // of step 0, in bytes
  RowPair rows_[kAtomsN];
};

// Writes the tile to out, or, when k is split, to this split's part of the workspace.
template <typename T, int kBlockM>
__device__ void StoreTile(const Params& p, const Tile& tile, const Sums<kBlockM>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool partial = p.split_k > 1;
  // Rows of the workspace are padded to whole atoms, and its splits follow each other.
  const int64_t row_size = partial ? p.n_blocks * kAtom : p.n;
  const int64_t split_offset = tile.split * p.batch * p.m * row_size;
#pragma unroll
  for (int atom = 0; atom < kAtomsN; ++atom) {
#pragma unroll
    for (int mma = 0; mma < kBlockM / 8; ++mma) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t m = tile.m0 + mma * 8 + lane % 4 * 2 + i % 2;
        const int64_t n = (tile.n_block + atom) * kAtom + warp * 16 + i / 2 * 8 + lane / 4;
        if (m >= p.m || n >= row_size) continue;
        const int64_t offset = split_offset + (tile.batch * p.m + m) * row_size + n;
        const float value = sums[atom][mma][i];
        if (partial || p.out_float) {
          static_cast<float*>(p.out)[offset] = value;
        } else {
          static_cast<T*>(p.out)[offset] = T(value);
        }
      }
    }
  }
}

template <typename T, typename S, int kBlockM, int kBits>
__global__ void __launch_bounds__(kThreads) QmmSm80Kernel(const __grid_constant__ Params p) {
  constexpr int kStages = kNumStages<kBlockM, kBits>;
  extern __shared__ __align__(16) uint8_t ring[];  // [kStages][slot_bytes]
  const Tile tile = OwnTile<kBlockM, kBits>(p);

  StageCopier<T, S, kBlockM, kBits> copier(p, tile);
  StageMultiplier<T, S, kBlockM, kBits> multiplier(p, tile);

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (tile.stage_begin + i < tile.stage_end) copier.CopyNext(ring + i * p.slot_bytes);
    CommitCopies();
  }

  Sums<kBlockM> sums = {};
  int slot = 0;
  for (int stage = tile.stage_begin; stage < tile.stage_end; ++stage) {
    WaitCopies<kStages - 2>();
    // Every thread's part of this stage has landed, and all warps are done with the slot before
    // it, which the next copy overwrites.
    __syncthreads();
    if (stage + kStages - 1 < tile.stage_end) {
      copier.CopyNext(ring + (slot == 0 ? kStages - 1 : slot - 1) * p.slot_bytes);
    }
    CommitCopies();
    multiplier.MultiplyNext(ring + slot * p.slot_bytes, sums);
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  LaunchDependents();
  StoreTile<T, kBlockM>(p, tile, sums);
}

using Kernel = void (*)(Params);

// The table of instances: every tile of tokens for a lhs type T, scale type S and width.
template <typename T, typename S, int kBits>
Kernel KernelFor(int block_m) {
  switch (block_m) {
    case 16:
      return QmmSm80Kernel<T, S, 16, kBits>;
    case 32:
      return QmmSm80Kernel<T, S, 32, kBits>;
    case 64:
      return QmmSm80Kernel<T, S, 64, kBits>;
  }
  return nullptr;
}

template <typename T>
Kernel KernelFor(ElementType scale, int bits, int block_m) {
  if (scale == ElementType::kF32) {
    return bits == 4 ? KernelFor<T, float, 4>(block_m) : KernelFor<T, float, 8>(block_m);
  }
  return bits == 4 ? KernelFor<T, T, 4>(block_m) : KernelFor<T, T, 8>(block_m);
}

Kernel KernelFor(ElementType lhs, ElementType scale, int bits, int block_m) {
  return lhs == ElementType::kBf16 ? KernelFor<__nv_bfloat16>(scale, bits, block_m)
                                   : KernelFor<__half>(scale, bits, block_m);
}

}  // namespace

cudaError_t InitializeQmmSm80() {
  for (ElementType lhs : {ElementType::kBf16, ElementType::kF16}) {
    for (ElementType scale : {ElementType::kF32, lhs}) {
      for (int bits : {4, 8}) {
        for (int block_m : {16, 32, 64}) {
          const cudaError_t error = cudaFuncSetAttribute(
              KernelFor(lhs, scale, bits, block_m), cudaFuncAttributeMaxDynamicSharedMemorySize,
              qmm_sm80::kMaxSharedBytes);
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchQmmSm80(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, cudaStream_t stream) {
  const int scale_bytes = problem.scale == ElementType::kF32 ? 4 : 2;
  Params p;
  p.lhs = buffers.lhs;
  p.packed = buffers.packed;
  p.scale = buffers.scale;
  p.zero = static_cast<const uint8_t*>(buffers.zero);
  p.index = buffers.index;
  p.out = choice.split_k > 1 ? buffers.workspace : buffers.out;
  p.batch = problem.batch;
  p.num_weights = problem.num_weights;
  p.m = problem.m;
  p.n = problem.n;
  p.k = problem.k;
  p.m_tiles = CeilDiv(problem.m, choice.block_m);
  p.n_tiles = CeilDiv(problem.n, kBlockN);
  p.n_blocks = static_cast<int>(problem.n_blocks());
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  p.group_size = problem.group_size < 0 ? INT_MAX : static_cast<int>(problem.group_size);
  p.split_k = choice.split_k;
  p.out_float = problem.out == ElementType::kF32;
  p.lhs_aligned =
      problem.k % (kCopyBytes / 2) == 0 && reinterpret_cast<uintptr_t>(p.lhs) % kCopyBytes == 0;
  p.bytes = qmm_sm80::StageBytesOf(choice.block_m, problem.bits, problem.group_size, scale_bytes,
                                   p.zero != nullptr);
  p.slot_bytes = p.bytes.total();
  p.block_groups = qmm_sm80::BlockK(problem.bits) / p.group_size;
  p.block_rest = qmm_sm80::BlockK(problem.bits) % p.group_size;
  p.groups_per_stage = qmm_sm80::GroupsPerStage(problem.bits, problem.group_size);
  const int64_t ctas = p.m_tiles * p.n_tiles * p.split_k * p.batch;
  if (ctas > INT_MAX) return cudaErrorInvalidConfiguration;
  const int shared_bytes = qmm_sm80::NumStages(choice.block_m, problem.bits) * p.slot_bytes;
  const Kernel kernel = KernelFor(problem.lhs, problem.scale, problem.bits, choice.block_m);
  kernel<<<static_cast<unsigned>(ctas), kThreads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jaxlowbit
