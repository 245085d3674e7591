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
  __device__ RowLoader(const Params& p, Memory memory, const StepInfo& info, int layer, int step,
                       Watch& watch)
      : p_(p),
        memory_(memory),
        info_(info),
        watch_(watch),
        layer_(layer),
        step_(step),
        thread_(static_cast<int>(threadIdx.x)),
        own_(info.vectors()),
        epoch_(p.epoch + layer + info.lhs_epoch) {}

  // Called by all consumers.
  __device__ void Load() {
    if (info_.norm != nullptr) {
      LoadNormalized();
    } else if (info_.plain) {
      LoadRows();
    } else {
      LoadPolled();
    }
    SynchronizeAll();  // all rows are in shared memory
  }

 private:
  static constexpr int kThreads = I::kConsumerThreads;
  static constexpr int kRows = I::kRows;
  static constexpr int kVectorBytes = 16;  // of two entries

  __device__ static void SynchronizeAll() { Synchronize(1, kThreads); }
  __device__ int number() const { return layer_ * kWalkSteps + step_; }
  __device__ void Record(WalkStamp stamp) const { StampNow<I>(p_, number(), stamp); }

  // Before all entries are polled, waits as WalkOptions::slack says, so that fewer are polled in vain: for a count of
  // stores, or in each warp for its first entry, at `from`. Only a hint, so relaxed: all entries are tested anyway.
  __device__ void WaitForHint(const uint8_t* from) {
    if (p_.slack == -1 || !p_.waits) return;
    if (p_.slack < 0) {
      if (thread_ % 32 == 0 && thread_ < own_) {
        watch_.Until(kForRows, number(), [&] {
          return Difference(LoadEntries(reinterpret_cast<const uint64_t*>(from))) == 0;
        });
      }
      __syncwarp();
      return;
    }
    if (thread_ < 32) {
      const Product& product = p_.products[step_];
      const auto target = static_cast<int64_t>(epoch_ - 1) * product.lhs_arrivals - p_.slack;
      watch_.Until(kForCount, number(),
                   [&] { return static_cast<int64_t>(LoadRelaxed(product.lhs_count)) >= target; });
      __syncwarp();
    }
    SynchronizeAll();
  }

  // Vectors of four columns, from `from` on, every kThreads-th, kCount of them for each of several parts.
  template <int kParts, int kCount>
  struct Vectors {
    const uint8_t* from[kParts];
    int count;  // of these vectors exist
    EntryPair pairs[kParts][kCount] = {};
    __device__ bool Has(int j) const { return j * kThreads < count; }
  };

  // Polls until all vectors are there; those that are there are not loaded again.
  template <int kParts, int kCount>
  __device__ void Poll(Vectors<kParts, kCount>& v) {
    watch_.Until(kForRows, number(), [&] {
      uint32_t differences = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (v.Has(j) && Difference(v.pairs[part][j]) != 0) {
            const uint8_t* const from = v.from[part] + j * kThreads * kVectorBytes;
            v.pairs[part][j] = LoadEntries(reinterpret_cast<const uint64_t*>(from));
          }
        }
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (v.Has(j)) differences |= Difference(v.pairs[part][j]);
        }
      }
      if (differences == 0 || !p_.waits) return true;
      if (p_.sleep > 0) Sleep(p_.sleep);
      return false;
    });
  }

  // Where the thread stores its first vector, as ldmatrix reads rows without bank conflicts: chunk c of row r at c ^ r.
  __device__ uint32_t Place() const {
    return memory_.base + p_.lhs_at + thread_ / 16 * (kRows * kLhsBytes) + thread_ % 16 * 8;
  }
  __device__ static void Store(uint32_t place, int row, int j, uint2 columns) {
    StoreShared8((place ^ (row * kCopyBytes)) + (j * kThreads / 16 * kRows + row) * kLhsBytes,
                 columns);
  }

  // Copies rows that earlier kernels wrote.
  __device__ void LoadRows() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const auto* const from =
          reinterpret_cast<const uint2*>(info_.lhs + row * info_.lhs_row_bytes) + thread_;
#pragma unroll 1
      for (int j = 0; j * kThreads < own_ - thread_; ++j)
        Store(Place(), row, j, from[j * kThreads]);
    }
  }

  __device__ void LoadPolled() {
    constexpr int kCount = I::kGroups == 1 && kRows == 1 ? 8 : 4;
    WaitForHint(info_.lhs + thread_ * kVectorBytes);
    uint32_t place = Place();
#pragma unroll 1
    for (int first = 0; first < own_; first += kCount * kThreads) {
      Vectors<kRows, kCount> v;
      v.count = own_ - first - thread_;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        v.from[row] = info_.lhs + row * info_.lhs_row_bytes + (first + thread_) * kVectorBytes;
      }
      Poll(v);
      if (first == 0) {
        Record(kStampSeen);
        SynchronizeAll();  // no warp reads rows of the step before
        Record(kStampSquares);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (v.Has(j)) Store(place, row, j, Columns(v.pairs[row][j]));
        }
      }
      place += kCount * kThreads / 16 * kRows * kLhsBytes;
    }
  }

  __device__ static uint2 Columns(const EntryPair& pair) {
    return {static_cast<uint32_t>(pair.first), static_cast<uint32_t>(pair.second)};
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
    constexpr int kCount = I::kVectors;
    // Parts: for each row this CTA's half, then the other half, of which only the sum of squares is needed.
    Vectors<2 * kRows, kCount> v;
    v.count = own_ - thread_;
    const int other = (ClusterRank() == 0 ? own_ : -own_) * kVectorBytes;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      v.from[2 * row] = info_.lhs + row * info_.lhs_row_bytes + thread_ * kVectorBytes;
      v.from[2 * row + 1] = v.from[2 * row] + other;
    }
    float4 scales[kCount] = {};
    const uint8_t* norm = info_.norm + static_cast<int64_t>(layer_) * info_.norm_stride;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (v.Has(j)) scales[j] = LoadScales(norm, thread_ + j * kThreads);
    }
    WaitForHint(v.from[0]);
    Poll(v);
    Record(kStampSeen);
    SendSquares(v);
    SynchronizeAll();  // also: no warp reads rows of the step before
    Record(kStampSquares);
    const uint32_t place = Place();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float factor = rsqrtf(SumOfSquares(row) * p_.mean_factor + p_.epsilon);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint2 own = Columns(v.pairs[2 * row][j]);
        if (v.Has(j)) {
          Store(place, row, j,
                {Normalized(own.x, factor, scales[j].x, scales[j].y),
                 Normalized(own.y, factor, scales[j].z, scales[j].w)});
        }
      }
    }
  }

  // Stores this warp's sums of squares. Both CTAs add both halves in an order with equal results.
  template <class V>
  __device__ void SendSquares(const V& v) const {
    float sums[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float halves[2] = {0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < I::kVectors; ++j) {
          if (v.Has(j)) halves[half] += SquaresOf(v.pairs[2 * row + half][j]);
        }
      }
      sums[row] = halves[0] + halves[1];
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        sums[row] += __shfl_xor_sync(~0u, sums[row], lanes);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (thread_ % 32 == 0) {
        StoreShared4(memory_.squares(row) + thread_ / 32 * 4, __float_as_uint(sums[row]));
      }
    }
  }

  __device__ float SumOfSquares(int row) const {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < I::kConsumers; i += 4) {
      const uint4 four = LoadShared16(memory_.squares(row) + i * 4);
      sums[0] += __uint_as_float(four.x), sums[1] += __uint_as_float(four.y);
      sums[2] += __uint_as_float(four.z), sums[3] += __uint_as_float(four.w);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // Scales of four columns.
  __device__ float4 LoadScales(const uint8_t* norm, int vector) const {
    if (info_.wide_norm) return LoadConstant16(norm + vector * 16);
    const uint2 pairs = LoadConstant8(norm + vector * 8);
    return {Pair<T>::Low(pairs.x), Pair<T>::High(pairs.x), Pair<T>::Low(pairs.y),
            Pair<T>::High(pairs.y)};
  }

  __device__ static uint32_t Normalized(uint32_t both, float factor, float low, float high) {
    return Pair<T>::Round(Pair<T>::Low(both) * factor * low, Pair<T>::High(both) * factor * high);
  }

  // Zero if both entries have the epoch.
  __device__ uint32_t Difference(const EntryPair& pair) const {
    return (static_cast<uint32_t>(pair.first >> 32) ^ epoch_) |
           (static_cast<uint32_t>(pair.second >> 32) ^ epoch_);
  }

  const Params& p_;
  const Memory memory_;
  const StepInfo& info_;
  Watch& watch_;
  const int layer_, step_, thread_;
  const int own_;  // vectors of four columns of a CTA's half
  const uint32_t epoch_;
};

}  // namespace jaxlowbit::sm90_stream::walk
