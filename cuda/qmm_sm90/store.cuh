// SPDX-License-Identifier: Apache-2.0
//
// Sums to global memory. Where a cluster divides k, each of its CTAs adds up some of the tokens:
// everyone sends it their sums, and it adds them in the order of the parts, so that results are the
// same bits every time.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/qmm_sm90/multiply.cuh"

namespace jaxlowbit::qmm_sm90 {

// Four, or two, 8 x 8 matrices of 16-bit values to shared memory, transposed; lane i passes the
// address of row i % 8 of matrix i / 8.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ inline void StoreTransposed(uint32_t shared, const uint32_t (&matrices)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
      "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
      : "memory");
}
__device__ inline void StoreTransposed(uint32_t shared, const uint32_t (&matrices)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};\n" ::"r"(shared),
               "r"(matrices[0]), "r"(matrices[1])
               : "memory");
}

template <class I>
class TileStorer {
 public:
  using T = typename I::T;

  __device__ TileStorer(const Params& p, const Share& share, Memory memory)
      : p_(p), share_(share), memory_(memory) {}

  // Before sums can arrive.
  __device__ void Expect() const {
    ArriveExpecting(memory_.sums_full(), Parts() * I::kStrips * OwnBlocks() * kFragmentBytes);
  }

  // Adds up and stores the tokens of this CTA. Overwrites the ring, which no CTA of the cluster uses
  // any more.
  __device__ void Reduce(const Tile& tile, const Sums<I>& sums) const {
    const int own = OwnBlocks();
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int owner = block >> kBlockShift - p_.split_shift;
        const int rank = RankOf(p_, owner, share_.mate);
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = sums[s][block * 4 + i];
        StoreRemote(MapToRank(Fragment(share_.part, s, block & own - 1), rank), values,
                    MapToRank(memory_.sums_full(), rank));
      }
    }
    WaitForCluster(memory_.sums_full(), 0);
    const int strip = tile.strip + threadIdx.x / 128 * I::kStrips;
    const int token = tile.token + share_.part * own * 8;
#pragma unroll 1
    for (int i = 0; i < I::kStrips * own; ++i) {
      const int s = i / own, block = i - s * own;
      float total[4] = {};
#pragma unroll 2
      for (int from = 0; from < Parts(); ++from) {
        const uint4 values = LoadShared16(Fragment(from, s, block));
        total[0] += __uint_as_float(values.x);
        total[1] += __uint_as_float(values.y);
        total[2] += __uint_as_float(values.z);
        total[3] += __uint_as_float(values.w);
      }
      if (strip + s < p_.n_blocks) StoreBlock(tile.batch, strip + s, token + block * 8, total);
    }
  }

  // Sums of all of k.
  __device__ void Store(const Tile& tile, const Sums<I>& sums) {
    const int warpgroup = threadIdx.x / 128;
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int strip = tile.strip + warpgroup * I::kStrips + s;
      if (strip >= p_.n_blocks) break;
      if (p_.aligned) {
        StoreBoxes(tile, strip, sums[s]);
      } else {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          float values[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) values[i] = sums[s][block * 4 + i];
          StoreElements(tile.batch, strip, tile.token + block * 8, values);
        }
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
  static constexpr int kBlockShift = kBlocks == 4 ? 2 : kBlocks == 8 ? 3 : kBlocks == 16 ? 4 : 5;
  static_assert(1 << kBlockShift == kBlocks);
  static constexpr int kFragmentBytes = 32 * I::kWarps * 16;  // 8 tokens
  static constexpr int kBufferBytes = I::kStoreTokens * 128;

  // Of k; blocks of 8 tokens that this CTA adds up.
  __device__ int Parts() const { return 1 << p_.split_shift; }
  __device__ int OwnBlocks() const { return kBlocks >> p_.split_shift; }

  // Of this lane: what a part of k has of one of those blocks.
  __device__ uint32_t Fragment(int sender, int strip, int block) const {
    return memory_.stage(p_.plan, 0) +
           ((sender * I::kStrips + strip) * OwnBlocks() + block) * kFragmentBytes +
           threadIdx.x * 16;
  }

  // 8 tokens of a warp's 16 channels.
  __device__ void StoreBlock(int batch, int strip, int token, const float (&sums)[4]) const {
    if (!p_.aligned) {
      StoreElements(batch, strip, token, sums);
      return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t buffer = memory_.results() + warp * 256;
    const uint32_t matrices[2] = {Pair<T>::Round(sums[0] * kUnit, sums[1] * kUnit),
                                  Pair<T>::Round(sums[2] * kUnit, sums[3] * kUnit)};
    __syncwarp();  // the block before has been read
    // Rows are tokens, matrices the first and the last 8 channels.
    StoreTransposed(buffer + lane % 8 * 32 + lane / 8 % 2 * 16, matrices);
    __syncwarp();
    const int m = token + lane / 2;
    const int n = strip * static_cast<int>(kAtom) + warp % 4 * 16 + lane % 2 * 8;
    if (lane >= 16 || m >= p_.m || n >= p_.n) return;
    T* out = static_cast<T*>(p_.out_elements) + (int64_t{batch} * p_.m + m) * p_.n + n;
    *reinterpret_cast<uint4*>(out) = LoadShared16(buffer + lane * 16);
  }

  __device__ void StoreElements(int batch, int strip, int token, const float (&sums)[4]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = token + lane % 4 * 2 + i % 2;
      const int n = strip * static_cast<int>(kAtom) + warp * 16 + lane / 4 + i / 2 * 8;
      if (m >= p_.m || n >= p_.n) continue;
      const int64_t offset = (int64_t{batch} * p_.m + m) * p_.n + n;
      const float value = sums[i] * kUnit;
      if (p_.out_float) {
        static_cast<float*>(p_.out_elements)[offset] = value;
      } else {
        static_cast<T*>(p_.out_elements)[offset] = T(value);
      }
    }
  }

  __device__ void StoreBoxes(const Tile& tile, int strip, const float (&sums)[I::kTokens / 2]) {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    // Lane i has the address of row i % 8 of matrix i / 8: rows are tokens, matrices g and g + 8 of
    // the channels, then the next 8 tokens.
    const int row = lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
    const uint32_t lane_offset = row * 128 + (column ^ row % 8) * 16;
#pragma unroll
    for (int token = 0; token < I::kTokens; token += 16) {
      const uint32_t buffer =
          memory_.results() + (warpgroup * kStoreBuffers + buffer_) * kBufferBytes;
      const int in_box = token % I::kStoreTokens;
      if (in_box == 0) {
        if (threadIdx.x % 128 == 0) WaitStoresRead<kStoreBuffers - 1>();
        Synchronize(1 + warpgroup, 128);
      }
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        matrices[i] =
            Pair<T>::Round(sums[token / 2 + 2 * i] * kUnit, sums[token / 2 + 2 * i + 1] * kUnit);
      }
      StoreTransposed(buffer + in_box * 128 + lane_offset, matrices);
      if (in_box + 16 == I::kStoreTokens) {
        PublishShared();
        Synchronize(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) {
          StoreBox(&p_.out, strip * static_cast<int>(kAtom), tile.token + token - in_box,
                   tile.batch, buffer);
          CommitStores();
        }
        buffer_ = (buffer_ + 1) % kStoreBuffers;
      }
    }
  }

  const Params& p_;
  const Share& share_;
  const Memory memory_;
  int buffer_ = 0;  // for the next box
};

}  // namespace jaxlowbit::qmm_sm90
