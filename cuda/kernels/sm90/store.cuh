// SPDX-License-Identifier: Apache-2.0
//
// Stores the accumulators of a tile to global memory, through the epilogue if there is one.
//
// A store tile is kStoreRows of a strip, stored by one TMA operation. Use of a warpgroup's kStoreBuffers buffers:
//
//   Form::kOther   0, 1: results of a store tile. 2: accumulators of half a store tile (gated: of the gate). 3: gated:
//                  accumulators of up. If the other warpgroup has up, that one instead sends half a store tile in each
//                  of its four buffers.
//   other forms    each: results of a store tile, in turn. With residuals only 0 and 1 are used, and TMA first loads
//                  the residual of the store tile there.
#pragma once

#include <utility>

#include "cuda/device/bulk.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm90/multiply.cuh"

namespace jaxlowbit::sm90 {

// Stores two, or four, 8 x 8 matrices of 16-bit values to shared memory, transposed. Lane i passes the address of row
// i % 8 of matrix i / 8.
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
// Loads four such matrices.
__device__ inline void LoadTransposed(uint32_t shared, uint32_t (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared)
               : "memory");
}
template <class I>
class TileStorer {
 public:
  using T = typename I::Out;

  __device__ TileStorer(const Params& p, Memory memory) : p_(p), memory_(memory) {}

  // Called before the products of a tile: loads its biases, and starts loading residuals into free buffers.
  __device__ void Begin(const Tile& tile) {
    StartTile(tile);
    if (p_.epilogue.any) WaitForPreviousKernels();  // they may have written the operands
    if (p_.epilogue.bias != nullptr) LoadBiases(tile);
    if (!p_.residual_by_tma || threadIdx.x % 128 != 0) return;
    WaitStoresRead<0>();
    CopyResidual(tile, 0, buffer_);
  }

  __device__ void Store(const Tile& tile, const Accumulators<I>& acc, const Factors<I>& factors) {
    StartTile(tile);
    if constexpr (I::kIsInt8) {
      if (p_.out_integers) return StoreIntegers(tile, acc);
    }
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) factors_[s][h] = factors[s][h];
    }
    switch (p_.form) {
      case Form::kSum:
        return StoreByTma<Form::kSum>(tile, acc);
      case Form::kSigmoid:
        if (Gated()) return StoreGated(tile, acc);
        return StoreByTma<Form::kSigmoid>(tile, acc);
      case Form::kGelu:
        return StoreByTma<Form::kGelu>(tile, acc);
      case Form::kRelu:
        return StoreByTma<Form::kRelu>(tile, acc);
      case Form::kFloat:
        return StoreFloats(tile, acc);
      case Form::kOther:
        return StoreFinished(tile, acc);
    }
  }

  // Ragged: stores zeros in all columns of a block of rows without a weight.
  __device__ void StoreZeros(const Tile& tile) const {
    for (int row = tile.m0; row < tile.end; ++row) {
      for (int n = threadIdx.x; n < p_.n; n += 32 * I::kWarps) {
        if (p_.out_float) {
          static_cast<float*>(p_.out_data)[int64_t{row} * p_.n + n] = 0.0f;
        } else {
          static_cast<T*>(p_.out_data)[int64_t{row} * p_.n + n] = T(0.0f);
        }
      }
    }
  }

  // Shared memory must outlive the stores.
  __device__ void Finish() const {
    if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
  }

 private:
  static constexpr int kBlocks = I::kM / 8;
  static constexpr bool kSupportsGated = I::kTile.supports_gated();
  static constexpr int kBufferBytes = I::kStoreRows * 128;
  static constexpr int kResultBytes = ResultBytes(I::kTile);  // of a warpgroup
  // In a gated product, two warpgroups have the gate and up.
  static constexpr bool kUpIsRemote = I::kStrips == 1;
  // Half a store tile: rows, blocks of 8 rows, halves per tile. The accumulators of a half fill a buffer.
  static constexpr int kHalfRows = I::kStoreRows / 2, kHalfBlocks = kHalfRows / 8;
  static constexpr int kHalves = I::kM / kHalfRows;
  static constexpr int kStoreTiles = kHalves / 2;  // of a strip
  static constexpr int kGatedRows = GatedStoreRows(I::kTile);
  static constexpr int kUnroll = kHalfBlocks % 2 == 0 ? 2 : 1;  // blocks per epilogue iteration

  __device__ bool Gated() const { return kSupportsGated && p_.epilogue.gated; }
  __device__ auto Schedule() const {
    if constexpr (I::kRagged) {
      return Ragged<kSupportsGated>{expert_, 0, 0, end_, p_.ragged.experts, p_.epilogue.gated};
    } else {
      return Batched<int, kSupportsGated>{p_.m, p_.epilogue.gated};
    }
  }
  __device__ void StartTile(const Tile& tile) {
    if constexpr (I::kRagged) expert_ = tile.batch, end_ = tile.end;
  }

  // The strip of the result, for strip `s` of this warpgroup.
  __device__ int Strip(const Tile& tile, int s) const {
    const int strip = tile.strip + static_cast<int>(threadIdx.x) / 128 * I::kStrips;
    return Gated() ? strip / 2 : strip + s;
  }

  // --- the epilogue ---

  __device__ void LoadBiases(const Tile& tile) {
    const EpilogueParams& e = p_.epilogue;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s == I::kStrips && !Gated()) break;
      const int64_t product = Schedule().Position(tile.batch, s);
      const int n = Strip(tile, s) * static_cast<int>(kAtom) + Channel();
#pragma unroll
      for (int h = 0; h < 2; ++h) biases_[s][h] = LoadBias<T>(e, product, p_.n, n + 8 * h);
    }
  }

  // The thread's index, recomputed here instead of occupying a register while wgmma run.
  __device__ static int Thread() { return Opaque(static_cast<int>(threadIdx.x)); }

  // This lane's first channel of a strip.
  __device__ static int Channel() {
    const int thread = Thread();
    return thread / 32 % 4 * 16 + thread % 32 / 4;
  }

  // Computes results from the accumulators of blocks of strip `s`, or of the gate and of up.
  template <int kCount>
  __device__ void FinishBlocks(int s, float (&up)[kCount], const float (&residual)[kCount],
                               float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float second = biases_[1][i / 2 % 2];
      values[i] += s == 0 ? biases_[0][i / 2 % 2] : second;
      up[i] += second;
    }
    jaxlowbit::Finish<I::kRagged>(p_.epilogue, up, residual, values);
  }

  // One thread of a warpgroup: starts loading the residual of one of its store tiles to a buffer.
  __device__ void CopyResidual(const Tile& tile, int store_tile, int buffer) const {
    const int s = store_tile / kStoreTiles, m0 = (store_tile - s * kStoreTiles) * I::kStoreRows;
    const int strip = Strip(tile, s);
    if (strip >= p_.n_blocks) return;
    const int warpgroup = threadIdx.x / 128;
    const uint32_t full = memory_.residual_full(warpgroup, buffer % kResultBuffers);
    ArriveExpecting(full, kBufferBytes);
    TmaLoad(Buffer(warpgroup, buffer % kResultBuffers), &p_.residual,
            strip * static_cast<int>(kAtom), tile.m0 + m0, tile.batch, full);
  }

  // Loads the residual of a block of 8 rows from `m0` on.
  __device__ void LoadResidual(int batch, int strip, int m0, float* residual) const {
    const int m = m0 + Thread() % 4 * 2;
    const int n = strip * static_cast<int>(kAtom) + Channel();
    const int64_t offset = Schedule().Row(batch, m) * p_.n + n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = m + i % 2 < Schedule().Rows(batch) && n + i / 2 * 8 < p_.n;
      const int64_t at = offset + i % 2 * p_.n + i / 2 * 8;
      residual[i] = exists ? jaxlowbit::LoadResidual<T>(p_.epilogue, at) : 0.0f;
    }
  }

  // Stores a warpgroup's accumulators of half a store tile of strip kHalf / kHalves, times their factors, in the order
  // of threads.
  template <int kHalf>
  __device__ void StoreAccumulators(uint32_t buffer, const Accumulators<I>& acc) const {
#pragma unroll
    for (int block = 0; block < kHalfBlocks; ++block) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = acc[kHalf / kHalves][(kHalf % kHalves * kHalfBlocks + block) * 4 + i] *
                    factors_[kHalf / kHalves][i / 2];
      }
      StoreShared16<kHalf>(buffer + block * 2048 + threadIdx.x % 128 * 16, values);
    }
  }

  template <int... kHalf>
  __device__ void StoreAccumulators(int half, uint32_t buffer, const Accumulators<I>& acc,
                                    std::integer_sequence<int, kHalf...>) const {
    ((half == kHalf ? StoreAccumulators<kHalf>(buffer, acc) : void()), ...);
  }

  __device__ void StoreAccumulators(int half, uint32_t buffer, const Accumulators<I>& acc) const {
    StoreAccumulators(half, buffer, acc, std::make_integer_sequence<int, I::kStrips * kHalves>{});
  }

  __device__ static void LoadAccumulators(uint32_t buffer, int block, float* acc) {
    const uint4 four = LoadShared16(buffer + block * 2048 + threadIdx.x % 128 * 16);
    acc[0] = __uint_as_float(four.x), acc[1] = __uint_as_float(four.y);
    acc[2] = __uint_as_float(four.z), acc[3] = __uint_as_float(four.w);
  }

  // Synchronizes both warpgroups. synccheck does not support a named barrier reached from different code paths.
  __device__ void SynchronizeWarpgroups() {
    if constexpr (kForSanitizer) {
      Arrive(memory_.exchange());
      Wait(memory_.exchange(), exchanges_++ % 2);
    } else {
      Synchronize(kExchangeBarrier, 256);
    }
  }

  // Stores the second warpgroup's accumulators of up for the first warpgroup.
  __device__ void SendUp(const Accumulators<I>& acc) {
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const int buffer = half % kStoreBuffers;
      if (buffer == 0 && sent_ > 0) Wait(memory_.up_empty(), (sent_ - 1) % 2);
      StoreAccumulators(half, Buffer(1, buffer), acc);
      if (buffer == kStoreBuffers - 1 || half == kHalves - 1) {
        ArriveForOthers(kExchangeBarrier, 256);
        ++sent_;
      }
    }
  }

  // Form::kOther: stores results half a store tile at a time, in a loop through shared memory, since registers cannot
  // be indexed. The loop limits code size: each formula is compiled once.
  __device__ void StoreFinished(const Tile& tile, const Accumulators<I>& acc) {
    const int warpgroup = threadIdx.x / 128;
    if (Strip(tile, 0) >= p_.n_blocks) return;
    const bool up_is_remote = kUpIsRemote && Gated();  // the other warpgroup has up
    if (up_is_remote && warpgroup == 1) {
      SendUp(acc);
      return;
    }
    const int halves = Gated() ? kHalves : I::kStrips * kHalves;
#pragma unroll 1
    for (int half = 0; half < halves; ++half) {
      const int s = half / kHalves, in_strip = half - s * kHalves, strip = Strip(tile, s);
      if (strip >= p_.n_blocks) break;
      const uint32_t first = Buffer(warpgroup, kResultBuffers);
      const uint32_t second =
          up_is_remote ? Buffer(1, in_strip % kStoreBuffers) : first + kBufferBytes;
      StoreAccumulators(half, first, acc);
      if (!kUpIsRemote && Gated()) StoreAccumulators(half + kHalves, second, acc);
      if (up_is_remote && in_strip % kStoreBuffers == 0) Synchronize(kExchangeBarrier, 256);
      const int row = in_strip % 2 * kHalfRows;  // in the store tile
      if (p_.aligned && row == 0) {
        if (threadIdx.x % 128 == 0) WaitStoresRead<kResultBuffers - 1>();
        Synchronize(kWarpgroupBarrier + warpgroup, 128);
      }
#pragma unroll 1
      for (int block = 0; block < kHalfBlocks; block += kUnroll) {
        const int m0 = tile.m0 + in_strip * kHalfRows + block * 8;
        float values[4 * kUnroll], up[4 * kUnroll] = {}, residual[4 * kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          LoadResidual(tile.batch, strip, m0 + i * 8, residual + 4 * i);
          LoadAccumulators(first, block + i, values + 4 * i);
          if (Gated()) LoadAccumulators(second, block + i, up + 4 * i);
        }
        FinishBlocks(s, up, residual, values);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const float* four = values + 4 * i;
          if (p_.aligned) {
            const uint32_t matrices[2] = {Pair<T>::Round(four[0], four[1]),
                                          Pair<T>::Round(four[2], four[3])};
            StoreTransposed(
                InStoreTile(Buffer(warpgroup, buffer_ % kResultBuffers), row + (block + i) * 8),
                matrices);
          } else {
            StoreElements(tile.batch, strip, m0 + i * 8, four);
          }
        }
      }
      if (up_is_remote &&
          (in_strip % kStoreBuffers == kStoreBuffers - 1 || in_strip == kHalves - 1)) {
        ArriveAsWarp(memory_.up_empty(), threadIdx.x % 32);
      }
      if (p_.aligned && row > 0) {
        EndStoreTile(strip, tile.m0 + in_strip * kHalfRows - row, tile.batch,
                     Buffer(warpgroup, buffer_ % kResultBuffers));
      }
    }
  }

  // --- stores ---

  __device__ uint32_t Buffer(int warpgroup, int buffer) const {
    return memory_.results() + warpgroup * kResultBytes + buffer * kBufferBytes;
  }

  // The address of this lane's row of two 8 x 8 matrices: rows from `row` on, the first and the last 8 of the warp's
  // channels.
  __device__ static uint32_t InStoreTile(uint32_t store_tile, int row) {
    const int thread = Thread(), warp = thread / 32 % 4, lane = thread % 32;
    return store_tile + (row + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  }

  // Stores the first rows of a store tile of `kRows`, up to the end of the group.
  template <int kRows>
  __device__ void StorePart(int strip, int m0, uint32_t buffer) const {
    constexpr int kCount = kCopyBytes / 2;
    for (int i = Thread() % 128; i < kRows * 8; i += 128) {
      const int row = i / 8, column = i % 8, n = strip * static_cast<int>(kAtom) + column * kCount;
      if (m0 + row >= end_ || n >= p_.n) continue;
      *reinterpret_cast<uint4*>(static_cast<T*>(p_.out_data) + int64_t{m0 + row} * p_.n + n) =
          LoadShared16(buffer + row * 128 + (column ^ row % 8) * kCopyBytes);
    }
  }

  // Starts storing a store tile. Call after all threads of the warpgroup have written it.
  template <int kRows = I::kStoreRows>
  __device__ void EndStoreTile(int strip, int m0, int batch, uint32_t buffer) {
    PublishShared();
    Synchronize(kWarpgroupBarrier + threadIdx.x / 128, 128);
    if constexpr (I::kRagged) {
      if (m0 + kRows > end_) {
        StorePart<kRows>(strip, m0, buffer);
        if (threadIdx.x % 128 == 0) CommitStores();  // nothing, but every buffer has a group
        buffer_ = (buffer_ + 1) % kStoreBuffers;
        return;
      }
      batch = 0;
    }
    if (threadIdx.x % 128 == 0) {
      TmaStore(&p_.out, strip * static_cast<int>(kAtom), m0, batch, buffer);
      CommitStores();
    }
    buffer_ = (buffer_ + 1) % kStoreBuffers;
  }

  __device__ void StoreElements(int batch, int strip, int m0, const float* values) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = m0 + threadIdx.x % 4 * 2 + i % 2;
      const int n = strip * static_cast<int>(kAtom) + Channel() + i / 2 * 8;
      if (m >= Schedule().Rows(batch) || n >= p_.n) continue;
      const int64_t offset = Schedule().Row(batch, m) * p_.n + n;
      if (p_.out_float) {
        static_cast<float*>(p_.out_data)[offset] = values[i];
      } else {
        static_cast<T*>(p_.out_data)[offset] = T(values[i]);
      }
    }
  }

  // Stores the value of each accumulator: a warp writes 32 bytes of each of four rows at a time.
  template <class Out, class Value>
  __device__ void StoreWords(const Tile& tile, const Value& value) const {
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int n = Strip(tile, s) * static_cast<int>(kAtom) + Channel();
      const int first = tile.m0 + Thread() % 4 * 2;
      Out* out = static_cast<Out*>(p_.out_data) + Schedule().Row(tile.batch, first) * p_.n + n;
#pragma unroll
      for (int i = 0; i < I::kM / 2; ++i) {
        const int m = i / 4 * 8 + i % 2, h = i / 2 % 2;
        if (first + m < Schedule().Rows(tile.batch) && n + 8 * h < p_.n) {
          out[int64_t{m} * p_.n + 8 * h] = value(s, i, h);
        }
      }
    }
  }

  // The accumulators contain the bits of integers.
  __device__ void StoreIntegers(const Tile& tile, const Accumulators<I>& acc) const {
    StoreWords<int>(tile, [&](int s, int i, int) { return __float_as_int(acc[s][i]); });
  }

  // Gives the bits of Form::kOther, which adds a residual of 0.
  __device__ void StoreFloats(const Tile& tile, const Accumulators<I>& acc) const {
    StoreWords<float>(tile, [&](int s, int i, int h) {
      return __fmul_rn(acc[s][i], factors_[s][h]) + biases_[s][h] + 0.0f;
    });
  }

  // Returns the buffer for the next store tile, which is free or contains that tile's residual. Starts loading the
  // residual of the following store tile to the other of two buffers.
  __device__ uint32_t BeginStoreTile(const Tile& tile, int store_tile) const {
    const int warpgroup = threadIdx.x / 128;
    if (p_.residual_by_tma) {
      if (threadIdx.x % 128 == 0 && store_tile + 1 < I::kStrips * kStoreTiles) {
        WaitStoresRead<0>();
        CopyResidual(tile, store_tile + 1, buffer_ + 1);
      }
      const int buffer = buffer_ % kResultBuffers;
      Wait(memory_.residual_full(warpgroup, buffer), buffer_ / kResultBuffers);
      return Buffer(warpgroup, buffer);
    }
    if (threadIdx.x % 128 == 0) WaitStoresRead<kStoreBuffers - 1>();
    Synchronize(kWarpgroupBarrier + warpgroup, 128);
    return Buffer(warpgroup, buffer_);
  }

  // Stores gated results of accumulators in registers.
  __device__ void StoreGated(const Tile& tile, const Accumulators<I>& acc) {
    if (Strip(tile, 0) >= p_.n_blocks) return;
    if constexpr (!kUpIsRemote) {
      StoreGatedByTma(tile, acc);
    } else if (threadIdx.x < 128) {
      ExchangeAndStore<0>(tile, acc);
    } else {
      ExchangeAndStore<1>(tile, acc);
    }
  }

  __device__ void StoreGatedByTma(const Tile& tile, const Accumulators<I>& acc) {
    uint32_t buffer;
#pragma unroll
    for (int m0 = 0; m0 < I::kM; m0 += 16) {
      const int in_store_tile = m0 % I::kStoreRows;
      if (in_store_tile == 0) buffer = BeginStoreTile(tile, m0 / I::kStoreRows);
      float values[8];
      Gate(acc[0] + m0 / 2, factors_[0], acc[I::kStrips - 1] + m0 / 2, factors_[I::kStrips - 1],
           values);
      StoreRowsOf(buffer, in_store_tile, values);
      if (in_store_tile + 16 == I::kStoreRows) {
        EndStoreTile(Strip(tile, 0), tile.m0 + m0 - in_store_tile, tile.batch, buffer);
      }
    }
  }

  // One warpgroup has the gate, the other up. Each finishes half of the rows, reading the other's accumulators from the
  // other's buffers. Results overwrite accumulators that have been read.
  template <int kWarpgroup>
  __device__ void ExchangeAndStore(const Tile& tile, const Accumulators<I>& acc) {
    constexpr int kOwn = kWarpgroup * kBlocks / 2, kOther = kBlocks / 2 - kOwn;
    constexpr int kStoreTileRows = kGatedRows;
    constexpr float kOnes[] = {1, 1};
    if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
    SynchronizeWarpgroups();  // the stores of both have read the buffers
    const uint32_t given = Buffer(kWarpgroup, 0), up_empty = Buffer(1 - kWarpgroup, 0);
#pragma unroll
    for (int block = 0; block < kBlocks / 2; ++block) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = acc[0][(kOther + block) * 4 + i] * factors_[0][i / 2];
      }
      StoreShared16<kWarpgroup>(given + block * 2048 + threadIdx.x % 128 * 16, values);
    }
    SynchronizeWarpgroups();
#pragma unroll
    for (int store_tile = 0; store_tile < I::kM / 2 / kStoreTileRows; ++store_tile) {
      const uint32_t buffer = up_empty + store_tile * kStoreTileRows * 256;
      float others[kStoreTileRows / 2];
#pragma unroll
      for (int block = 0; block < kStoreTileRows / 8; ++block) {
        const uint4 four = LoadShared16(buffer + block * 2048 + threadIdx.x % 128 * 16);
        others[block * 4] = __uint_as_float(four.x),
                       others[block * 4 + 1] = __uint_as_float(four.y);
        others[block * 4 + 2] = __uint_as_float(four.z);
        others[block * 4 + 3] = __uint_as_float(four.w);
      }
      Synchronize(kWarpgroupBarrier + kWarpgroup, 128);
#pragma unroll
      for (int m0 = 0; m0 < kStoreTileRows; m0 += 16) {
        const float* own = acc[0] + (kOwn * 8 + store_tile * kStoreTileRows + m0) / 2;
        const float* other = others + m0 / 2;
        float values[8];
        if constexpr (kWarpgroup == 0) {
          Gate(own, factors_[0], other, kOnes, values);
        } else {
          Gate(other, kOnes, own, factors_[0], values);
        }
        StoreRowsOf(buffer, m0, values);
      }
      EndStoreTile<kStoreTileRows>(Strip(tile, 0), tile.m0 + kOwn * 8 + store_tile * kStoreTileRows,
                                   tile.batch, buffer);
    }
  }

  // Gated results of two blocks of rows.
  __device__ void Gate(const float* gate, const float (&gate_factors)[2], const float* up,
                       const float (&up_factors)[2], float (&values)[8]) const {
    const SigmoidForm sigmoid = SigmoidFormOf(p_.epilogue.activation);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int h = i / 2 % 2;
      values[i] = TimesSigmoid(sigmoid, fmaf(gate[i], gate_factors[h], biases_[0][h])) *
                  fmaf(up[i], up_factors[h], biases_[1][h]);
    }
  }

  // The address of this lane's row of four 8 x 8 matrices: rows from `row` on, the first and the last 8 of the warp's
  // channels, then the next 8 rows.
  __device__ static uint32_t InStoreTileOfFour(uint32_t store_tile, int row) {
    const int thread = Thread(), warp = thread / 32 % 4, lane = thread % 32;
    const int own = lane / 16 * 8 + lane % 8;
    return store_tile + (row + own) * 128 + ((2 * warp + lane / 8 % 2) ^ own % 8) * 16;
  }

  // Stores two blocks of rows, from `row` of the store tile on.
  __device__ static void StoreRowsOf(uint32_t store_tile, int row, const float (&values)[8]) {
    uint32_t matrices[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      matrices[i] = Pair<T>::Round(values[2 * i], values[2 * i + 1]);
    }
    StoreTransposed(InStoreTileOfFour(store_tile, row), matrices);
  }

  // Stores results of accumulators in registers.
  template <Form kForm>
  __device__ void StoreByTma(const Tile& tile, const Accumulators<I>& acc) {
    const SigmoidForm sigmoid = SigmoidFormOf(p_.epilogue.activation);
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int strip = Strip(tile, s);
      if (strip >= p_.n_blocks) break;
      uint32_t buffer;
#pragma unroll
      for (int m0 = 0; m0 < I::kM; m0 += 16) {
        const int in_store_tile = m0 % I::kStoreRows;
        if (in_store_tile == 0) buffer = BeginStoreTile(tile, s * kStoreTiles + m0 / I::kStoreRows);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          values[i] = fmaf(acc[s][m0 / 2 + i], factors_[s][i / 2 % 2], biases_[s][i / 2 % 2]);
          if (kForm == Form::kSigmoid) values[i] = TimesSigmoid(sigmoid, values[i]);
          if (kForm == Form::kGelu) values[i] = Gelu(values[i]);
          if (kForm == Form::kRelu) values[i] = Relu(values[i]);
        }
        if (p_.residual_by_tma) {
          uint32_t matrices[4];
          LoadTransposed(InStoreTileOfFour(buffer, in_store_tile), matrices);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            values[2 * i] += Pair<T>::Low(matrices[i]);
            values[2 * i + 1] += Pair<T>::High(matrices[i]);
          }
        }
        StoreRowsOf(buffer, in_store_tile, values);
        if (in_store_tile + 16 == I::kStoreRows) {
          EndStoreTile(strip, tile.m0 + m0 - in_store_tile, tile.batch, buffer);
        }
      }
    }
  }

  const Params& p_;
  const Memory memory_;
  // Biases of a lane's channels g and g + 8: in each strip of the warpgroup, or in the gate and in up. Adding -0
  // changes nothing.
  float biases_[2][2] = {{-0.0f, -0.0f}, {-0.0f, -0.0f}};
  Factors<I> factors_;        // of the accumulators of a tile
  int buffer_ = 0;            // for the next store tile
  int sent_ = 0;              // number of SendUp batches that filled the buffers
  int exchanges_ = 0;         // of both warpgroups, in a build for compute-sanitizer
  int expert_ = 0, end_ = 0;  // ragged: of the tile
};

}  // namespace jaxlowbit::sm90
