// SPDX-License-Identifier: Apache-2.0
//
// Sums to global memory. Where a cluster has divided k, each of its CTAs owns some of the tokens:
// the others send it their sums, and it adds them in the order of their parts, so that results are
// the same bits every time.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/qmm_sm90/multiply.cuh"

namespace jaxlowbit::qmm_sm90 {

// Four 8 x 8 matrices of 16-bit values to shared memory, transposed; lane i passes the address of row
// i % 8 of matrix i / 8.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ inline void StoreTransposed(uint32_t shared, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   shared),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

template <class I>
class TileStorer {
 public:
  using T = typename I::T;

  __device__ TileStorer(const Params& p, const Share& share, Memory memory)
      : p_(p), share_(share), memory_(memory), owned_(I::kTokens >> p.split_shift) {}

  // Before the sums of others can arrive.
  __device__ void Expect() const {
    const int others = (1 << p_.split_shift) - 1;
    ArriveExpecting(memory_.sums_full(), others * I::kStrips * owned_ / 8 * kFragmentBytes);
  }

  // Adds up what the cluster has of the tokens that this CTA owns. Overwrites the ring, which no CTA
  // of the cluster uses any more.
  __device__ void Reduce(Sums<I>& sums) const {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int owner = block * 8 / owned_;
        if (owner == share_.part) continue;
        float part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = sums[s][block * 4 + i];
        const int sender = share_.part - (owner < share_.part);
        const int rank = RankOf(p_, owner, share_.mate);
        StoreRemote(MapToRank(Fragment(sender, s, block), rank), part,
                    MapToRank(memory_.sums_full(), rank));
      }
    }
    WaitForCluster(memory_.sums_full(), 0);
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (block * 8 / owned_ != share_.part) continue;
        float total[4] = {};
#pragma unroll 1
        for (int from = 0; from < 1 << p_.split_shift; ++from) {
          if (from == share_.part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] += sums[s][block * 4 + i];
          } else {
            const uint4 part = LoadShared16(Fragment(from - (share_.part < from), s, block));
            total[0] += __uint_as_float(part.x);
            total[1] += __uint_as_float(part.y);
            total[2] += __uint_as_float(part.z);
            total[3] += __uint_as_float(part.w);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[s][block * 4 + i] = total[i];
      }
    }
  }

  __device__ void Store(const Tile& tile, const Sums<I>& sums) {
    const int warpgroup = threadIdx.x / 128;
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int strip = tile.strip + warpgroup * I::kStrips + s;
      if (strip >= p_.n_blocks) break;
      if (p_.boxed) {
        StoreBoxes(tile, strip, sums[s]);
      } else {
        StoreElements(tile, strip, sums[s]);
      }
    }
  }

  // Shared memory must outlive the stores.
  __device__ void Finish() const {
    if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
  }

 private:
  static constexpr float kUnit = 1 << kWeightShift<T>;  // of sums
  static constexpr int kBlocks = I::kTokens / 8;
  static constexpr int kFragmentBytes = 32 * I::kWarps * 16;  // 8 tokens of every warp
  static constexpr int kBufferBytes = I::kStoreTokens * 128;

  // Of this lane: the sums of a block of tokens that one of the others sends.
  __device__ uint32_t Fragment(int sender, int strip, int block) const {
    const int own = block & (owned_ / 8 - 1);
    return memory_.stage(p_.plan, 0) +
           ((sender * I::kStrips + strip) * (owned_ / 8) + own) * kFragmentBytes + threadIdx.x * 16;
  }

  __device__ bool Owns(int token) const { return token / owned_ == share_.part; }

  __device__ void StoreBoxes(const Tile& tile, int strip, const float (&sums)[I::kTokens / 2]) {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int box = min(I::kStoreTokens, owned_);
    // Lane i has the address of row i % 8 of matrix i / 8: rows are tokens, matrices g and g + 8 of
    // the channels, then the next 8 tokens.
    const int row = lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
    const uint32_t lane_offset = row * 128 + (column ^ row % 8) * 16;
#pragma unroll
    for (int token = 0; token < I::kTokens; token += 16) {
      if (!Owns(token)) continue;
      const uint32_t buffer =
          memory_.results() + (warpgroup * kStoreBuffers + buffer_) * kBufferBytes;
      const int in_box = token & (box - 1);
      if (in_box == 0) {
        if (threadIdx.x % 128 == 0) WaitStoresRead<kStoreBuffers - 1>();
        Synchronize(1 + warpgroup, 128);
      }
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        matrices[i] = Pair<T>::Round(sums[token / 2 + 2 * i] * kUnit,
                                     sums[token / 2 + 2 * i + 1] * kUnit);
      }
      StoreTransposed(buffer + in_box * 128 + lane_offset, matrices);
      if (in_box + 16 == box) {
        PublishShared();
        Synchronize(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) {
          StoreBox(&p_.out, strip * static_cast<int>(kAtom), tile.token + token + 16 - box,
                   tile.batch, buffer);
          CommitStores();
        }
        buffer_ = (buffer_ + 1) % kStoreBuffers;
      }
    }
  }

  __device__ void StoreElements(const Tile& tile, int strip,
                                const float (&sums)[I::kTokens / 2]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int n = strip * static_cast<int>(kAtom) + warp * 16 + lane / 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (!Owns(block * 8)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = tile.token + block * 8 + lane % 4 * 2 + i % 2;
        if (m >= p_.m || n + i / 2 * 8 >= p_.n) continue;
        const int64_t offset = (int64_t{tile.batch} * p_.m + m) * p_.n + n + i / 2 * 8;
        const float value = sums[block * 4 + i] * kUnit;
        if (p_.out_float) {
          static_cast<float*>(p_.out_elements)[offset] = value;
        } else {
          static_cast<T*>(p_.out_elements)[offset] = T(value);
        }
      }
    }
  }

  const Params& p_;
  const Share& share_;
  const Memory memory_;
  const int owned_;  // tokens of a tile, that this CTA stores
  int buffer_ = 0;   // for the next box
};

}  // namespace jaxlowbit::qmm_sm90
