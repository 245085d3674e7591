// SPDX-License-Identifier: Apache-2.0
//
// The walk's activations: the consumers of a CTA wait for the step before, and copy the rows of the CTA's half of k to
// shared memory, normalized or not. Entries are polled themselves: each has the epoch that wrote it.
#pragma once

#include "cuda/device/pair.cuh"
#include "cuda/kernels/sm90_stream/walk_params.cuh"

namespace jaxlowbit::sm90_stream::walk {

template <class I>
class RowLoader {
 public:
  __device__ RowLoader(const Params& p, Memory memory, int layer, int step, Watch& watch)
      : p_(p),
        product_(p.products[step]),
        memory_(memory),
        watch_(watch),
        layer_(layer),
        number_(layer * kWalkSteps + step),
        thread_(static_cast<int>(threadIdx.x)),
        own_(product_.atoms * 16),
        rank_(ClusterRank()),
        epoch_(p.epoch + layer + product_.lhs_epoch) {}

  // Called by all consumers.
  __device__ void Load() {
    if (product_.norm != nullptr) {
      LoadNormalized();
    } else if (product_.plain_lhs != nullptr) {
      LoadRows();
    } else {
      LoadPlain();
    }
    SynchronizeAll();  // all rows are in shared memory
  }

 private:
  static constexpr int kThreads = I::kConsumerThreads;

  __device__ static void SynchronizeAll() { Synchronize(1, kThreads); }

  // Waits until most results of the step before have been stored. Only a hint, so relaxed: entries are tested anyway.
  __device__ void WaitForCount() {
    if (p_.slack < 0 || !p_.waits) return;
    if (thread_ < 32) {
      const auto target = static_cast<int64_t>(epoch_ - 1) * product_.lhs_arrivals - p_.slack;
      watch_.Until(kForCount, number_,
                   [&] { return static_cast<int64_t>(LoadRelaxed(product_.lhs_count)) >= target; });
      __syncwarp();
    }
    SynchronizeAll();
  }

  __device__ const uint64_t* Place(int row, int vector) const {
    return product_.lhs + int64_t{row} * product_.lhs_row + vector * 2;
  }

  __device__ bool IsThere(const EntryPair& pair) const {
    return static_cast<uint32_t>(pair.first >> 32) == epoch_ &&
           static_cast<uint32_t>(pair.second >> 32) == epoch_;
  }

  // Polls vectors until all are there. `place(j)`: null if there is none.
  template <int kCount, class PlaceOf>
  __device__ void Poll(const PlaceOf& place, EntryPair (&pairs)[kCount]) {
    watch_.Until(kForRows, number_, [&] {
      bool there = true;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint64_t* from = place(j);
        if (from != nullptr) pairs[j] = LoadEntries(from);
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (place(j) != nullptr) there &= IsThere(pairs[j]);
      }
      if (there || !p_.waits) return true;
      if (p_.sleep > 0) Sleep(p_.sleep);
      return false;
    });
  }

  // Stores four columns of this CTA's half.
  __device__ void Store(int row, int vector, uint2 columns) const {
    const int chunk = vector % 16 / 2 ^ row;  // as ldmatrix reads them without bank conflicts
    StoreShared8(memory_.base + p_.lhs_at + (vector / 16 * I::kRows + row) * kLhsBytes +
                     chunk * kCopyBytes + vector % 2 * 8,
                 columns);
  }

  // Copies rows of earlier kernels.
  __device__ void LoadRows() {
    const auto* rows = reinterpret_cast<const uint2*>(product_.plain_lhs);
#pragma unroll
    for (int row = 0; row < I::kRows; ++row) {
      for (int vector = thread_; vector < own_; vector += kThreads) {
        Store(row, vector, rows[(row * 2 + rank_) * own_ + vector]);
      }
    }
  }

  __device__ void LoadPlain() {
    constexpr int kBatch = 8;
    WaitForCount();
    const int count = own_ * I::kRows;
    for (int first = thread_; first - thread_ < count; first += kBatch * kThreads) {
      EntryPair pairs[kBatch] = {};
      const auto place = [&](int j) -> const uint64_t* {
        const int i = first + j * kThreads, row = I::kRows > 1 && i >= own_ ? 1 : 0;
        return i < count ? Place(row, rank_ * own_ + i - row * own_) : nullptr;
      };
      Poll(place, pairs);
      if (first == thread_) SynchronizeAll();  // no warp reads rows of the step before
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kThreads, row = I::kRows > 1 && i >= own_ ? 1 : 0;
        if (i < count) {
          Store(row, i - row * own_,
                {static_cast<uint32_t>(pairs[j].first), static_cast<uint32_t>(pairs[j].second)});
        }
      }
    }
  }

  __device__ static float SquaresOf(const EntryPair& pair) {
    float sum = 0;
#pragma unroll
    for (uint32_t both : {static_cast<uint32_t>(pair.first), static_cast<uint32_t>(pair.second)}) {
      const float low = Pair<T>::Low(both), high = Pair<T>::High(both);
      sum = fmaf(low, low, sum);
      sum = fmaf(high, high, sum);
    }
    return sum;
  }

  __device__ void LoadNormalized() {
    constexpr int kVectors = I::kVectors, kRows = I::kRows;
    float4 scales[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int vector = thread_ + j * kThreads;
      if (vector < own_) scales[j] = LoadScales(rank_ * own_ + vector);
    }
    WaitForCount();
    // Vectors of rank 0's half, then of rank 1's, for each row.
    EntryPair pairs[kRows * 2 * kVectors] = {};
    const auto place = [&](int j) -> const uint64_t* {
      const int vector = thread_ + j % kVectors * kThreads;
      return vector < own_ ? Place(j / (2 * kVectors), j / kVectors % 2 * own_ + vector) : nullptr;
    };
    Poll(place, pairs);
    float squares[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 2 * kVectors; ++j) sum += SquaresOf(pairs[row * 2 * kVectors + j]);
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (thread_ % 32 == 0) StoreShared4(memory_.squares(thread_ / 32, row), __float_as_uint(sum));
    }
    SynchronizeAll();  // also: no warp reads rows of the step before
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      squares[row] = 0;
#pragma unroll
      for (int warp = 0; warp < I::kConsumers; ++warp) {
        squares[row] += __uint_as_float(LoadShared4(memory_.squares(warp, row)));
      }
      const float factor = rsqrtf(squares[row] / static_cast<float>(product_.columns) + p_.epsilon);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int vector = thread_ + j * kThreads;
        const int first = row * 2 * kVectors + j;
        // Selected, so that registers are not indexed.
        const EntryPair own = rank_ == 0 ? pairs[first] : pairs[first + kVectors];
        if (vector < own_) {
          Store(row, vector,
                {Normalized(static_cast<uint32_t>(own.first), factor, scales[j].x, scales[j].y),
                 Normalized(static_cast<uint32_t>(own.second), factor, scales[j].z, scales[j].w)});
        }
      }
    }
  }

  // Scales of four columns.
  __device__ float4 LoadScales(int vector) const {
    const uint8_t* norm = product_.norm + layer_ * product_.norm_stride;
    if (product_.wide_norm) return reinterpret_cast<const float4*>(norm)[vector];
    const uint2 pairs = reinterpret_cast<const uint2*>(norm)[vector];
    return {Pair<T>::Low(pairs.x), Pair<T>::High(pairs.x), Pair<T>::Low(pairs.y),
            Pair<T>::High(pairs.y)};
  }

  __device__ static uint32_t Normalized(uint32_t both, float factor, float low, float high) {
    return Pair<T>::Round(Pair<T>::Low(both) * factor * low, Pair<T>::High(both) * factor * high);
  }

  const Params& p_;
  const Product& product_;
  const Memory memory_;
  Watch& watch_;
  const int layer_, number_, thread_;
  const int own_;  // vectors of four columns of a CTA's half
  const int rank_;
  const uint32_t epoch_;
};

}  // namespace jaxlowbit::sm90_stream::walk
