// SPDX-License-Identifier: Apache-2.0
//
// Sums to global memory, through the epilogue where there is one. Where a cluster divides k, each of
// its CTAs adds up some of the tokens: everyone sends it their sums, and it adds them in the order of
// the parts, so that results are the same bits every time.
//
// Buffers of a warpgroup for its results, of kStoreTokens of a strip:
//
//   sums alone   results of a box in each, in turn
//   epilogue     0, 1: results of a box, first its residual; 2: sums of half a box, of the gate if gated;
//                3: the same of up, if this warpgroup has them. Of two warpgroups with a strip each, the
//                one with up leaves half a box in each of its four for the other.
#pragma once

#include <utility>

#include "cuda/device/bulk.cuh"
#include "cuda/device/dependency.cuh"
#include "cuda/qmm_sm90/multiply.cuh"

namespace jaxlowbit::qmm_sm90 {

// Two, or four, 8 x 8 matrices of 16-bit values to shared memory, transposed; lane i passes the
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
// And back.
__device__ inline void LoadTransposed(uint32_t shared, uint32_t (&matrices)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(matrices[0]), "=r"(matrices[1])
               : "r"(shared)
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

  // Before the products of a tile: starts copying residuals into the buffers that are free.
  __device__ void Begin(const Tile& tile) const {
    if (p_.epilogue.any) WaitForPreviousKernels();  // one may have written what is added
    if (!p_.residual_boxes || threadIdx.x % 128 != 0) return;
    WaitStoresRead<0>();
    const int boxes = p_.split_shift > 0 ? I::kStrips * OwnBoxes() : 1;
    for (int box = 0; box < boxes; ++box) CopyResidual(tile, box, buffer_ + box);
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
        StoreRemote(MapToRank(Fragment(share_.part, s, block & own - 1, threadIdx.x), rank), values,
                    MapToRank(memory_.sums_full(), rank));
      }
    }
    const EpilogueParams& e = p_.epilogue;
    const Biases biases = LoadBiases(tile);
    WaitForCluster(memory_.sums_full(), 0);
    // Of a gated product, pairs of strips: two warpgroups take turns.
    const bool shared = kApart && e.gated;
    const int step = shared ? 2 : 1, end = e.gated ? own : I::kStrips * own;
    const int gate = shared ? threadIdx.x % 128 : threadIdx.x;
#pragma unroll 1
    for (int i = shared ? threadIdx.x / 128 : 0; i < end; i += step) {
      const int s = i / own, block = i - s * own;
      const int strip = Strip(tile, s), token = OwnToken(tile) + block * 8;
      float total[4];
      Add(s, block, gate, total);
      if (strip >= p_.n_blocks) continue;
      if (e.any) {
        float up[4] = {}, residual[4];
        if (e.gated) Add(I::kStrips - 1, block, kApart ? gate + 128 : gate, up);
        LoadResidual(tile.batch, strip, token, s * OwnBoxes() + block * 8 / I::kStoreTokens, 0,
                     block * 8 % I::kStoreTokens, residual);
        FinishBlocks(biases, s, up, residual, total);
      }
      StoreBlock(tile.batch, strip, token, total);
    }
  }

  // Sums of all of k.
  __device__ void Store(const Tile& tile, const Sums<I>& sums) {
    if (p_.epilogue.any) {
      StoreFinished(tile, sums);
      return;
    }
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int strip = Strip(tile, s);
      if (strip >= p_.n_blocks) break;
      if (p_.aligned) {
        StoreBoxes(tile, strip, sums[s]);
      } else {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          float values[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) values[i] = sums[s][block * 4 + i] * kUnit;
          StoreElements(tile.batch, strip, tile.token + block * 8, values);
        }
      }
    }
  }

  // Shared memory must outlive the stores.
  __device__ void Finish() const {
    if (handed_over_) Synchronize(kTaken, 256);
    if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
  }

 private:
  static constexpr float kUnit = 1 << kWeightShift<T>;  // of sums
  static constexpr int kBlocks = I::kTokens / 8;
  static constexpr int kBlockShift = kBlocks == 4 ? 2 : kBlocks == 8 ? 3 : kBlocks == 16 ? 4 : 5;
  static_assert(1 << kBlockShift == kBlocks);
  static constexpr int kFragmentBytes = 32 * I::kWarps * 16;  // 8 tokens
  static constexpr int kBufferBytes = I::kStoreTokens * 128;
  // Of a gated product, two warpgroups have gate and up.
  static constexpr bool kApart = I::kStrips == 1;
  static_assert(I::kCtaStrips == 2);
  // Half a box: tokens, blocks of 8 of them, and how many halves a tile has. Its sums fill a buffer.
  static constexpr int kHalfTokens = I::kStoreTokens / 2, kHalfBlocks = kHalfTokens / 8;
  static constexpr int kHalves = I::kTokens / kHalfTokens;
  static constexpr int kTogether = 2;  // blocks, whose epilogues overlap
  static_assert(kHalfBlocks % kTogether == 0);
  // Barriers between warpgroups: sums of up are there; have been taken.
  static constexpr int kHandedOver = 3, kTaken = 4;

  // Of k; blocks of 8 tokens that this CTA adds up, and boxes of those of a strip.
  __device__ int Parts() const { return 1 << p_.split_shift; }
  __device__ int OwnBlocks() const { return kBlocks >> p_.split_shift; }
  __device__ int OwnBoxes() const { return max(1, OwnBlocks() * 8 / I::kStoreTokens); }
  __device__ int OwnToken(const Tile& tile) const {
    return tile.token + share_.part * OwnBlocks() * 8;
  }

  // Of the result, for strip `s` of this warpgroup.
  __device__ int Strip(const Tile& tile, int s) const {
    if (p_.epilogue.gated) return tile.strip / 2;
    return tile.strip + static_cast<int>(threadIdx.x) / 128 * I::kStrips + s;
  }

  // What a part of k has of one of those blocks, for a thread.
  __device__ uint32_t Fragment(int sender, int strip, int block, int thread) const {
    return memory_.stage(p_.plan, 0) +
           ((sender * I::kStrips + strip) * OwnBlocks() + block) * kFragmentBytes + thread * 16;
  }

  __device__ void Add(int strip, int block, int thread, float (&total)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = 0;
#pragma unroll 2
    for (int from = 0; from < Parts(); ++from) {
      const uint4 values = LoadShared16(Fragment(from, strip, block, thread));
      total[0] += __uint_as_float(values.x);
      total[1] += __uint_as_float(values.y);
      total[2] += __uint_as_float(values.z);
      total[3] += __uint_as_float(values.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] *= kUnit;
  }

  // --- the epilogue ---

  // Of a lane's channels g and g + 8: in each strip of the warpgroup, or in the gate and in up.
  struct Biases {
    float of[2][2];
  };

  __device__ Biases LoadBiases(const Tile& tile) const {
    const EpilogueParams& e = p_.epilogue;
    Biases biases = {};
    if (e.bias == nullptr) return biases;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s == I::kStrips && !e.gated) break;
      const int64_t product = e.gated ? 2 * tile.batch + s : tile.batch;
      const int n = Strip(tile, s) * static_cast<int>(kAtom) + Channel();
#pragma unroll
      for (int h = 0; h < 2; ++h) biases.of[s][h] = LoadBias<T>(e, product, p_.n, n + 8 * h);
    }
    return biases;
  }

  // For what is worked out anew, not kept in registers while products run.
  __device__ static int Thread() { return Keep(static_cast<int>(threadIdx.x)); }

  // This lane's first channel of a strip.
  __device__ static int Channel() {
    const int thread = Thread();
    return thread / 32 % 4 * 16 + thread % 32 / 4;
  }

  // From the sums of blocks of strip `s`, or from those of the gate and of up, to their results.
  template <int kCount>
  __device__ void FinishBlocks(const Biases& biases, int s, float (&up)[kCount],
                               const float (&residual)[kCount], float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float second = biases.of[1][i / 2 % 2];
      values[i] += s == 0 ? biases.of[0][i / 2 % 2] : second;
      up[i] += second;
    }
    jaxlowbit::Finish(p_.epilogue, up, residual, values);
  }

  // One thread of a warpgroup: the residual of one of its boxes of a tile, to a buffer.
  __device__ void CopyResidual(const Tile& tile, int box, int buffer) const {
    const int s = box / OwnBoxes(), token = (box - s * OwnBoxes()) * I::kStoreTokens;
    const int strip = Strip(tile, s);
    if (strip >= p_.n_blocks) return;
    const int warpgroup = threadIdx.x / 128;
    const uint32_t full = memory_.residual_full(warpgroup, buffer % kResultBuffers);
    ArriveExpecting(full, kBufferBytes);
    CopyBox(Buffer(warpgroup, buffer % kResultBuffers), &p_.residual,
            strip * static_cast<int>(kAtom), OwnToken(tile) + token, tile.batch, full);
  }

  // Of a block of 8 tokens from `token` on, from row `row` of a box where there are those; `parity`: of
  // the box's copy.
  __device__ void LoadResidual(int batch, int strip, int token, int buffer, int parity, int row,
                               float* residual) const {
    if (p_.residual_boxes) {
      const int warpgroup = threadIdx.x / 128;
      Wait(memory_.residual_full(warpgroup, buffer), parity);
      uint32_t matrices[2];
      LoadTransposed(InBox(Buffer(warpgroup, buffer), row), matrices);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        residual[2 * h] = Pair<T>::Low(matrices[h]);
        residual[2 * h + 1] = Pair<T>::High(matrices[h]);
      }
      return;
    }
    const int m = token + Thread() % 4 * 2;
    const int n = strip * static_cast<int>(kAtom) + Channel();
    const int64_t offset = (int64_t{batch} * p_.m + m) * p_.n + n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = m + i % 2 < p_.m && n + i / 2 * 8 < p_.n;
      const int64_t at = offset + i % 2 * p_.n + i / 2 * 8;
      residual[i] = exists ? jaxlowbit::LoadResidual<T>(p_.epilogue, at) : 0.0f;
    }
  }

  // A warpgroup's sums of half a box, of strip kHalf / kHalves, where each thread finds its own.
  template <int kHalf>
  __device__ static void Leave(uint32_t buffer, const Sums<I>& sums) {
#pragma unroll
    for (int block = 0; block < kHalfBlocks; ++block) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = sums[kHalf / kHalves][(kHalf % kHalves * kHalfBlocks + block) * 4 + i];
      }
      StoreShared16<kHalf>(buffer + block * 2048 + threadIdx.x % 128 * 16, values);
    }
  }

  template <int... kHalf>
  __device__ static void Leave(int half, uint32_t buffer, const Sums<I>& sums,
                               std::integer_sequence<int, kHalf...>) {
    ((half == kHalf ? Leave<kHalf>(buffer, sums) : void()), ...);
  }

  __device__ static void Leave(int half, uint32_t buffer, const Sums<I>& sums) {
    Leave(half, buffer, sums, std::make_integer_sequence<int, I::kStrips * kHalves>{});
  }

  __device__ static void Take(uint32_t buffer, int block, float* sums) {
    const uint4 four = LoadShared16(buffer + block * 2048 + threadIdx.x % 128 * 16);
    sums[0] = __uint_as_float(four.x) * kUnit, sums[1] = __uint_as_float(four.y) * kUnit;
    sums[2] = __uint_as_float(four.z) * kUnit, sums[3] = __uint_as_float(four.w) * kUnit;
  }

  // The second warpgroup's sums of up, for the first.
  __device__ void HandOver(const Sums<I>& sums) {
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const int buffer = half % kStoreBuffers;
      if (buffer == 0 && handed_over_) Synchronize(kTaken, 256);
      Leave(half, Buffer(1, buffer), sums);
      if (buffer == kStoreBuffers - 1 || half == kHalves - 1) {
        ArriveForOthers(kHandedOver, 256);
        handed_over_ = true;
      }
    }
  }

  // Half a box at a time, so that registers need not be indexed.
  __device__ void StoreFinished(const Tile& tile, const Sums<I>& sums) {
    const EpilogueParams& e = p_.epilogue;
    const int warpgroup = threadIdx.x / 128;
    if (Strip(tile, 0) >= p_.n_blocks) return;
    const bool handed = kApart && e.gated;  // up, from the other warpgroup
    if (handed && warpgroup == 1) {
      HandOver(sums);
      return;
    }
    const Biases biases = LoadBiases(tile);
    const int halves = e.gated ? kHalves : I::kStrips * kHalves;
#pragma unroll 1
    for (int half = 0; half < halves; ++half) {
      const int s = half / kHalves, in_strip = half - s * kHalves, strip = Strip(tile, s);
      if (strip >= p_.n_blocks) break;
      const uint32_t first = Buffer(warpgroup, kResultBuffers);
      const uint32_t second = handed ? Buffer(1, in_strip % kStoreBuffers) : first + kBufferBytes;
      Leave(half, first, sums);
      if (!kApart && e.gated) Leave(half + kHalves, second, sums);
      if (handed && in_strip % kStoreBuffers == 0) Synchronize(kHandedOver, 256);
      const int row = in_strip % 2 * kHalfTokens;  // in the box
      if (p_.aligned && row == 0) EnterBox(tile, half / 2);
#pragma unroll 1
      for (int block = 0; block < kHalfBlocks; block += kTogether) {
        const int token = tile.token + in_strip * kHalfTokens + block * 8;
        float values[4 * kTogether], up[4 * kTogether] = {}, residual[4 * kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          LoadResidual(tile.batch, strip, token + i * 8, buffer_ % kResultBuffers,
                       buffer_ / kResultBuffers, row + (block + i) * 8, residual + 4 * i);
          Take(first, block + i, values + 4 * i);
          if (e.gated) Take(second, block + i, up + 4 * i);
        }
        FinishBlocks(biases, s, up, residual, values);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float* four = values + 4 * i;
          if (p_.aligned) {
            const uint32_t matrices[2] = {Pair<T>::Round(four[0], four[1]),
                                          Pair<T>::Round(four[2], four[3])};
            StoreTransposed(
                InBox(Buffer(warpgroup, buffer_ % kResultBuffers), row + (block + i) * 8),
                matrices);
          } else {
            StoreElements(tile.batch, strip, token + i * 8, four);
          }
        }
      }
      if (handed && (in_strip % kStoreBuffers == kStoreBuffers - 1 || in_strip == kHalves - 1)) {
        ArriveForOthers(kTaken, 256);
      }
      if (p_.aligned && row > 0) {
        LeaveBox(strip, tile.token + in_strip * kHalfTokens - row, tile.batch,
                 Buffer(warpgroup, buffer_ % kResultBuffers));
      }
    }
  }

  // The next box's buffer is free, or will hold its residual; that of the box after it is on its way.
  __device__ void EnterBox(const Tile& tile, int box) const {
    if (p_.residual_boxes) {
      if (threadIdx.x % 128 == 0 && box + 1 < I::kStrips * OwnBoxes()) {
        WaitStoresRead<0>();
        CopyResidual(tile, box + 1, buffer_ + 1);
      }
    } else {
      if (threadIdx.x % 128 == 0) WaitStoresRead<kResultBuffers - 1>();
      Synchronize(1 + threadIdx.x / 128, 128);
    }
  }

  // --- stores ---

  __device__ uint32_t Buffer(int warpgroup, int buffer) const {
    return memory_.results() + (warpgroup * kStoreBuffers + buffer) * kBufferBytes;
  }

  // Where this lane has its row of two 8 x 8 matrices: tokens from `row` on, the first and the last 8 of
  // the warp's channels.
  __device__ static uint32_t InBox(uint32_t box, int row) {
    const int thread = Thread(), warp = thread / 32 % 4, lane = thread % 32;
    return box + (row + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  }

  // All of a warpgroup have written the box.
  __device__ void LeaveBox(int strip, int token, int batch, uint32_t buffer) {
    PublishShared();
    Synchronize(1 + threadIdx.x / 128, 128);
    if (threadIdx.x % 128 == 0) {
      StoreBox(&p_.out, strip * static_cast<int>(kAtom), token, batch, buffer);
      CommitStores();
    }
    buffer_ = (buffer_ + 1) % kStoreBuffers;
  }

  // 8 tokens of a warp's 16 channels.
  __device__ void StoreBlock(int batch, int strip, int token, const float (&values)[4]) const {
    if (!p_.aligned) {
      StoreElements(batch, strip, token, values);
      return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t buffer = Buffer(0, kStoreBuffers - 1) + warp * 256;
    const uint32_t matrices[2] = {Pair<T>::Round(values[0], values[1]),
                                  Pair<T>::Round(values[2], values[3])};
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

  __device__ void StoreElements(int batch, int strip, int token, const float* values) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = token + threadIdx.x % 4 * 2 + i % 2;
      const int n = strip * static_cast<int>(kAtom) + Channel() + i / 2 * 8;
      if (m >= p_.m || n >= p_.n) continue;
      const int64_t offset = (int64_t{batch} * p_.m + m) * p_.n + n;
      if (p_.out_float) {
        static_cast<float*>(p_.out_elements)[offset] = values[i];
      } else {
        static_cast<T*>(p_.out_elements)[offset] = T(values[i]);
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
      const uint32_t buffer = Buffer(warpgroup, buffer_);
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
        LeaveBox(strip, tile.token + token - in_box, tile.batch, buffer);
      }
    }
  }

  const Params& p_;
  const Share& share_;
  const Memory memory_;
  int buffer_ = 0;  // for the next box
  bool handed_over_ = false;
};

}  // namespace jaxlowbit::qmm_sm90
