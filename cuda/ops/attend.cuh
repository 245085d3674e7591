// SPDX-License-Identifier: Apache-2.0
//
// The device code of attend.cu: products and softmax of a warp, and the reductions over warps and CTAs. The cache is in
// attend_cache.cuh.
//
// Bound: memory. The query heads that share a key head are the rows of the mma, so keys and values are read once. A CTA
// computes one key head and one split of the slots. Each warp processes units of 16 slots independently, with its own
// ring of copies, running maximum, running sum and accumulators, so the loop has no barrier. Units are assigned
// round-robin to keep all CTAs busy if few slots are in use; units without visible slots are not read. Warps are merged
// in shared memory, CTAs of a key head in CombineKernel (attend_splits.cuh), both in a fixed order.
//
// Every CTA rotates its queries and the new key in shared memory. The warp whose unit contains the slot to write stores
// key and value to the cache and to its copy of the unit, so no CTA reads data that another CTA writes.
//
//   AttendKernel   Units          masks of visible slots
//                  CacheCopier    keys and values of a unit to the ring; the new ones to the cache
//                  NewRows        queries and the new key and value: add biases, normalize, rotate, to shared memory
//                  UnitRing       copies kStages - 1 units ahead
//                  Sinks          scores without keys and values
//                  WarpAttention  scores, softmax and sums of a unit; the merge of the warps
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/approximate.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/transposed.cuh"
#include "cuda/limits.h"
#include "cuda/ops/attend_bytes.cuh"
#include "cuda/ops/attend_cache.cuh"
#include "cuda/ops/head_row.cuh"
#include "cuda/ops/rounded_row.cuh"

namespace jaxlowbit::attend {

// Halves of a product's rows with real heads.
template <bool kWide>
inline constexpr int kHalves = kWide ? 2 : 1;

template <typename T>
__device__ uint32_t Pack(float low, float high);
template <>
__device__ inline uint32_t Pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ inline uint32_t Pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ inline float QuadMax(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ inline float QuadSum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// The queries of the CTA, the new key and the new value, in shared memory.
template <typename T, typename C, int kSize>
class NewRows {
 public:
  using S = Shape<C, kSize>;
  using Row = HeadRow<T, kSize>;

  __device__ NewRows(const Params& p, uint8_t* shared)
      : p_(p),
        shared_(shared),
        first_head_(FirstHead(p)),
        new_head_(static_cast<int64_t>(Element()) * p.kv_heads + KvHead()),
        rows_(p.shared + 2),
        pairs_{p.size / 2, p.neighbours},
        angles_(pairs_, p.cos + Angle(), p.sin + Angle()),
        first_{SourceOf(Warp()), SourceOf(Warp() + S::kWarps)} {}

  // Depends on the addresses of the first rows.
  __device__ uint32_t Ready() const {
    uint32_t ready = 0;
    for (const Source& source : first_) {
      ready ^= LowWord(source.row) ^ LowWord(source.bias) ^ LowWord(source.norm);
    }
    return ready;
  }

  // Adds biases, normalizes and rotates the rows, one warp per row. `looks`: `units` compares positions while the first
  // two rows of a warp load.
  __device__ void Put(Units& units, bool looks) {
    const int warp = Warp();
    Row one = Load(first_[0]), two = Load(first_[1]);
    if (looks && units.count() > 0) units.Look();
    Put(warp, one);
    Put(warp + S::kWarps, two);
    for (int i = warp + 2 * S::kWarps; i < rows_; i += S::kWarps) {
      Row row = Load(SourceOf(i));
      Put(i, row);
    }
  }

  // Zeroes padding rows and columns.
  __device__ void ZeroOthers() const {
    constexpr int kVector = 8, kChunks = kSize / kVector;  // of queries
    const uint32_t rows = SharedAddress(shared_);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += S::kThreads) {
      const int row = i / kChunks, at = i % kChunks;
      const bool held = row < p_.shared && at * kVector < p_.size;
      if (!held) StoreShared16(rows + S::QueryPlace(row, at), make_uint4(0, 0, 0, 0));
    }
    const int i = static_cast<int>(threadIdx.x), row = i / S::kChunks, at = i % S::kChunks;
    if (row < 2 && at * S::kVector >= p_.size) {
      StoreShared16(rows + S::NewPlace(row, at), make_uint4(0, 0, 0, 0));
    }
  }

 private:
  __device__ int64_t Angle() const { return static_cast<int64_t>(Element()) * pairs_.half; }

  // Row i: queries, then the key and the value.
  __device__ bool IsKey(int i) const { return i == p_.shared; }
  __device__ bool IsValue(int i) const { return i > p_.shared; }

  // The addresses of a row, its bias and its factors; null if absent.
  struct Source {
    const T* row;
    const float *bias, *norm;
  };

  __device__ Source SourceOf(int i) const {
    const int row = min(i, rows_ - 1);
    const auto* query = static_cast<const T*>(p_.query) + (first_head_ + row) * p_.size;
    const auto* key = static_cast<const T*>(p_.key) + new_head_ * p_.size;
    const auto* value = static_cast<const T*>(p_.value) + new_head_ * p_.size;
    return {IsValue(row) ? value
            : IsKey(row) ? key
                         : query,
            Bias(row),
            IsValue(row) ? nullptr
            : IsKey(row) ? p_.key_norm
                         : p_.query_norm};
  }
  __device__ Row Load(const Source& source) const {
    return Row(pairs_, source.row, source.bias, source.norm);
  }

  __device__ const float* Bias(int row) const {
    if (p_.query_bias == nullptr) return nullptr;
    if (IsValue(row)) return p_.value_bias + KvHead() * p_.size;
    if (IsKey(row)) return p_.key_bias + KvHead() * p_.size;
    return p_.query_bias + (KvHead() * p_.shared + row) * p_.size;
  }

  __device__ void Put(int i, Row& held) const {
    if (i >= rows_) return;
    held.Widen();
    held.Normalize(p_.epsilon);
    if (!IsValue(i)) held.Rotate(angles_);
    if (IsKey(i) || IsValue(i)) {
      PutNew(IsValue(i) ? 1 : 0, held);
      return;
    }
    held.ForEach([&](int column, T value) {
      if constexpr (kHasScales<C>) column = QueryColumn(column);
      const int byte = S::QueryPlace(i, column / 8) + column % 8 * 2;
      *reinterpret_cast<T*>(shared_ + byte) = value;
    });
  }

  // Lane t of a quad loads 4 consecutive elements of an 8-bit key. It multiplies the first two by columns 2 t and
  // 2 t + 1 of a step of 16, and the others by columns 2 t + 8 and 2 t + 9.
  static __device__ int QueryColumn(int column) {
    const int at = column % 16;
    return column - at + at / 4 * 2 + at % 2 + at % 4 / 2 * 8;
  }

  // Stores the new key (row 0) or value (row 1) in the elements of the cache.
  __device__ void PutNew(int row, const Row& held) const {
    const auto store = [&](int column, C value) {
      const int byte = S::NewPlace(row, column / S::kVector) + column % S::kVector * sizeof(C);
      *reinterpret_cast<C*>(shared_ + byte) = value;
    };
    if constexpr (!kHasScales<C>) {
      held.ForEach(store);
    } else {
      constexpr bool kFloat8 = !std::is_same_v<C, int8_t>;
      uint32_t largest = 0;
      held.ForEach(
          [&](int, T value) { largest = max(largest, MagnitudeBits(static_cast<float>(value))); });
      const Divisor divisor(__reduce_max_sync(~0u, largest), kMaxValue<kFloat8>);
      held.ForEach([&](int column, T value) {
        const uint32_t code = Round<kFloat8>(divisor.Quotient(static_cast<float>(value)), 0);
        const uint8_t byte = isnan(divisor.scale) ? 0 : static_cast<uint8_t>(code);
        store(column, reinterpret_cast<const C&>(byte));
      });
      if (Lane() == 0) {
        reinterpret_cast<float*>(shared_ + S::kNewScales)[row] = divisor.scale;
      }
    }
  }

  const Params& p_;
  uint8_t* const shared_;
  const int64_t first_head_, new_head_;  // of queries; of key and value
  const int rows_;                       // without padding; the last two are key and value
  const Pairs<kSize> pairs_;
  const Angles<kSize> angles_;
  const Source first_[2];  // of this warp
};

// Copies units kStages - 1 ahead of the products.
template <typename C, int kSize>
class UnitRing {
 public:
  // `written`: the number of this warp's unit with the slot to write, or -1.
  __device__ UnitRing(const CacheCopier<C, kSize>& cache, Units& units, int written)
      : cache_(cache), units_(units), written_(written) {}

  __device__ int produced() const { return produced_; }

  // Starts copying the first units.
  __device__ void Fill() {
#pragma unroll 1
    for (int stage = 0; stage < Shape<C, kSize>::kStages - 1; ++stage) Produce(stage);
  }

  // Starts copying the next unit, if there is one, to `stage`.
  __device__ void Produce(int stage) {
    int number;
    uint32_t mask;
    if (units_.Next(&number, &mask)) {
      if (number > 0) cache_.Copy(stage, units_.SlotOf(number));
      if (Lane() == stage) mask_of_stage_ = mask;
      if (number == written_) written_stage_ = stage;
      ++produced_;
    }
    CommitCopies();
  }

  // The mask of the visible slots of the unit in `stage`.
  __device__ uint32_t Mask(int stage) const { return __shfl_sync(~0u, mask_of_stage_, stage); }

  // Returns whether `stage` contains the unit with the slot to write, and resets it: true only once.
  __device__ bool ConsumeWritten(int stage) {
    const bool has_written = stage == written_stage_;
    if (has_written) written_stage_ = -1;
    return has_written;
  }

 private:
  const CacheCopier<C, kSize>& cache_;
  Units& units_;
  const int written_;
  uint32_t mask_of_stage_ = 0;  // in lane i: the mask of stage i
  int written_stage_ = -1;      // the stage with the slot to write
  int produced_ = 0;
};

// The scores of the sinks of a lane's rows, times log2(e). One warp of one split starts its softmax with them; in all
// other warps, and without sinks, they are -infinity, which has no weight.
template <bool kWide>
class Sinks {
 public:
  __device__ explicit Sinks(const Params& p) {
    const bool adds = p.sinks != nullptr && Warp() == 0 && Split() == 0;
#pragma unroll
    for (int half = 0; half < kHalves<kWide>; ++half) {
      const int row = Lane() / 4 + 8 * half;
      const bool has = adds && row < p.shared;
      scores_[half] = has ? p.sinks[KvHead() * p.shared + row] * kLog2E : -INFINITY;
    }
  }

  __device__ float operator[](int half) const { return scores_[half]; }

 private:
  float scores_[kHalves<kWide>];
};

// Online softmax and weighted sums of a warp. kWide: more than 8 query heads per key head.
template <typename T, typename C, int kSize, bool kWide>
class WarpAttention {
 public:
  using S = Shape<C, kSize>;
  // Type of weights and values. A weight times the scale of an 8-bit value may exceed the range of float16.
  using V = std::conditional_t<kHasScales<C>, __nv_bfloat16, T>;

  // `new_rows`: the address of the queries.
  __device__ WarpAttention(float scale, uint32_t new_rows, const Sinks<kWide>& sinks)
      : scale_(scale * Divisor<T>()), new_rows_(new_rows) {
    const int lane = Lane();
    matrix_ = lane / 8;
    value_row_ = matrix_ % 2 * 8 + lane % 8;
    key_row_ = matrix_ / 2 * 8 + lane % 8;
    if constexpr (S::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) LoadQuery(step, query_[step]);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      top_[half] = fmaxf(sinks[half], kLowest);
      total_[half] = lane % 4 == 0 ? Exp2(sinks[half] - top_[half]) : 0;  // lanes are added later
    }
  }

  // Adds the values of the unit at `unit`. `mask`: its visible slots.
  __device__ void Add(uint32_t unit, uint32_t mask) {
    float scores[2][4] = {};  // of slots 8 * j + 2 * t + {0, 1}
    MultiplyKeys(unit, scores);
    uint32_t weights[4] = {};
    OnlineSoftmax(mask, unit + 2 * S::kUnitBytes, scores, weights);
    AddValues(unit + S::kUnitBytes, weights);
  }

  // Stores the warp's maxima, totals and sums to shared memory, each as [warp, row].
  __device__ void StorePartial(int shared_heads, float* merged, float* tops, float* totals) const {
    const int warp = Warp(), g = Lane() / 4, t = Lane() % 4;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = g + 8 * half;
      const float sum = QuadSum(total_[half]);
      if (row >= shared_heads) continue;
      const int own = warp * kRows + row;
      if (t == 0) tops[own] = top_[half], totals[own] = sum;
      float* const to = merged + own * S::kMergedRow;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float *a = sums_[2 * step] + 2 * half, *b = sums_[2 * step + 1] + 2 * half;
        if constexpr (kHasScales<C>) {
          constexpr float kTimes = Divisor<V>();
          *reinterpret_cast<float4*>(to + 16 * step + 4 * t) =
              make_float4(a[0] * kTimes, b[0] * kTimes, a[1] * kTimes, b[1] * kTimes);
        } else {
          *reinterpret_cast<float2*>(to + 16 * step + 2 * t) = make_float2(a[0], a[1]);
          *reinterpret_cast<float2*>(to + 16 * step + 8 + 2 * t) = make_float2(b[0], b[1]);
        }
      }
    }
  }

 private:
  static constexpr int kHalves = attend::kHalves<kWide>;
  static constexpr int kSteps = kSize / 16;

  // What keys, as pairs of T, and values, as pairs of V, are divided by.
  template <typename P>
  static __device__ constexpr float Divisor() {
    if constexpr (kHasScales<C>) return Widen<P, C, 0, 1>::kDivisor;
    return 1;
  }

  __device__ void LoadQuery(int step, uint32_t (&fragment)[4]) const {
    LoadMatrices(fragment, new_rows_ + S::QueryPlace(value_row_, 2 * step + matrix_ / 2));
  }

  // The fragment of the queries for a step.
  __device__ const uint32_t (&Query(int step))[4] {
    if constexpr (!S::kQueryInRegisters) LoadQuery(step, query_[0]);
    return query_[S::kQueryInRegisters ? step : 0];
  }

  __device__ void MultiplyKeys(uint32_t keys, float (&scores)[2][4]) {
    constexpr int kStepsOfLoad = S::kVector / 8;
#pragma unroll
    for (int load = 0; load < kSteps / kStepsOfLoad; ++load) {
      uint32_t b[4];
      LoadMatrices(b, keys + S::Place(key_row_, 2 * load + matrix_ % 2));
      if constexpr (kHasScales<C>) {  // b: two steps of the first slots, then of the others
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t (&a)[4] = Query(2 * load + i);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint32_t word = b[2 * j + i];
            Mma<T>(scores[j], a, Widen<T, C, 0, 1>::Of(word), Widen<T, C, 2, 3>::Of(word));
          }
        }
      } else {
        const uint32_t (&a)[4] = Query(load);
        Mma<T>(scores[0], a, b[0], b[1]);
        Mma<T>(scores[1], a, b[2], b[3]);
      }
    }
  }

  // The scales of the slots of this lane's scores, from `scales`; of keys, or of values.
  static __device__ void LoadScales(uint32_t scales, float (&found)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 pair = LoadShared8(scales + 4 * (8 * i + Lane() % 4 * 2));
      found[2 * i] = __uint_as_float(pair.x), found[2 * i + 1] = __uint_as_float(pair.y);
    }
  }

  // Converts scores to weights, as a fragment, and rescales the sums to the new maximum. `scales`: the address of the
  // scales of an 8-bit unit.
  __device__ void OnlineSoftmax(uint32_t mask, uint32_t scales, const float (&scores)[2][4],
                                uint32_t (&weights)[4]) {
    const int t = Lane() % 4;
    float of_keys[4], of_values[4];
    if constexpr (kHasScales<C>) {
      LoadScales(scales, of_keys);
      LoadScales(scales + S::kScaleBytes, of_values);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float highest = top_[half], weight[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool visible = mask >> (j / 2 * 8 + 2 * t + j % 2) & 1;
        float score = scores[j / 2][2 * half + j % 2] * scale_;
        if constexpr (kHasScales<C>) {
          score *= of_keys[j];
          of_values[j] = visible ? of_values[j] : 0;  // may be NaN
        }
        weight[j] = visible ? score : -INFINITY;
        highest = fmaxf(highest, weight[j]);
      }
      highest = QuadMax(highest);
      const float factor = Exp2(top_[half] - highest);
      top_[half] = highest;
      total_[half] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weight[j] = Exp2(weight[j] - highest);
        total_[half] += weight[j];
        if constexpr (kHasScales<C>) weight[j] *= of_values[j];
      }
      weights[half] = Pack<V>(weight[0], weight[1]);
      weights[2 + half] = Pack<V>(weight[2], weight[3]);
      // With 8-bit elements, instructions are the bound: only if a maximum has changed.
      if (!kHasScales<C> || __any_sync(~0u, factor != 1)) {
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          sums_[n][2 * half] *= factor;
          sums_[n][2 * half + 1] *= factor;
        }
      }
    }
  }

  // Adds 16 columns to sums_[2 * step] and sums_[2 * step + 1]: the first and the last 8 or, of 8-bit values, the even
  // and the odd ones.
  __device__ void AddValues(uint32_t values, const uint32_t (&weights)[4]) {
    constexpr int kStepsOfLoad = S::kVector / 8;
#pragma unroll
    for (int load = 0; load < kSteps / kStepsOfLoad; ++load) {
      uint32_t b[4];
      LoadTransposed(b, values + S::Place(value_row_, 2 * load + matrix_ / 2));
      if constexpr (kHasScales<C>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float (&even)[4] = sums_[2 * (2 * load + i)], (&odd)[4] = sums_[2 * (2 * load + i) + 1];
          const uint32_t first = b[2 * i], last = b[2 * i + 1];  // slots
          Mma<V>(even, weights, Widen<V, C, 0, 2>::Of(first), Widen<V, C, 0, 2>::Of(last));
          Mma<V>(odd, weights, Widen<V, C, 1, 3>::Of(first), Widen<V, C, 1, 3>::Of(last));
        }
      } else {
        Mma<V>(sums_[2 * load], weights, b[0], b[1]);
        Mma<V>(sums_[2 * load + 1], weights, b[2], b[3]);
      }
    }
  }

  const float scale_;
  const uint32_t new_rows_;
  // This lane's matrix in ldmatrix, and the rows whose addresses it passes: of queries and values, and of keys.
  int matrix_, value_row_, key_row_;
  uint32_t query_[S::kQueryInRegisters ? kSteps : 1][4];
  float top_[kHalves], total_[kHalves], sums_[2 * kSteps][4] = {};
};

// Merges the sums of the warps from shared memory. Stores results if there is one split, else sums with their maximum
// and total.
template <typename T, typename C, int kSize>
__device__ void StoreSums(const Params& p, const float* merged, const float* tops,
                          const float* totals) {
  using S = Shape<C, kSize>;
  const int warp = Warp(), lane = Lane();
  for (int row = warp; row < p.shared; row += S::kWarps) {
    float highest = kLowest, sum = 0, factors[S::kWarps];
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) highest = fmaxf(highest, tops[w * kRows + row]);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      factors[w] = Exp2(tops[w * kRows + row] - highest);
      sum += factors[w] * totals[w * kRows + row];
    }
    const int64_t head = FirstHead(p) + row;
    const int64_t part = head * p.splits + Split();
    const float whole = sum == 0 ? 0 : 1 / sum;  // 0 without visible slots
    for (int column = lane; column < p.size; column += 32) {
      float value = 0;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) {
        value += factors[w] * merged[(w * kRows + row) * S::kMergedRow + column];
      }
      // May overwrite the query: this CTA has read it, and with one split no other CTA reads these heads.
      if (p.sums == nullptr) {
        static_cast<T*>(p.out)[head * p.size + column] = T(value * whole);
      } else {
        p.sums[part * p.size + column] = value;
      }
    }
    if (p.sums != nullptr && lane == 0) p.stats[part] = make_float2(highest, sum);
  }
}

// Multiplies this warp's units in order. `ring` has been filled.
template <typename T, typename C, int kSize, bool kWide>
__device__ void AttendToUnits(const CacheCopier<C, kSize>& cache, UnitRing<C, kSize>& ring,
                              int slot, uint32_t new_rows,
                              WarpAttention<T, C, kSize, kWide>& attention) {
  using S = Shape<C, kSize>;
  int stage = 0, filled = S::kStages - 1;
#pragma unroll 1
  for (int i = 0; i < ring.produced(); ++i) {
    ring.Produce(filled);
    filled = filled + 1 == S::kStages ? 0 : filled + 1;
    WaitCopies<S::kStages - 1>();
    __syncwarp();  // the copies of all lanes have arrived
    const uint32_t mask = ring.Mask(stage), unit = cache.Stage(stage);
    const bool has_written = ring.ConsumeWritten(stage);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
    if (has_written) cache.Insert(unit, slot, new_rows);
    if (mask == 0) continue;
    if (!kHasScales<C> && mask != 0xffff) cache.ZeroMasked(unit, mask);
    attention.Add(unit, mask);
    __syncwarp();  // the stage has been read
  }
}

template <typename T, typename C, int kSize, bool kWide>
__device__ void AttendCta(const Params& p) {
  using S = Shape<C, kSize>;
  extern __shared__ __align__(128) uint8_t ring[];
  if (!p.holds_next) LaunchDependents();
  const CacheCopier<C, kSize> cache(p, ring);
  const int slot = *p.slot;
  const int worker = Warp() * p.splits + Split();
  const int workers = p.splits * S::kWarps;
  Units units(p, Element(), worker, workers);
  if (units.count() > 0) cache.Copy(0, units.SlotOf(0));  // before positions are compared

  // This warp's unit with the slot to write, or none.
  const bool writes = 0 <= slot && slot < p.slots && slot / kUnit % workers == worker;
  const int written = writes ? slot / kUnit / workers : -1;
  UnitRing<C, kSize> copies(cache, units, written);
  uint8_t* const new_rows = ring + S::kWarps * S::kRingBytes;
  NewRows<T, C, kSize> rows(p, new_rows);
  const Sinks<kWide> sinks(p);
  if (p.pdl) {  // old slots arrive while previous kernels compute the new rows
    if (units.count() > 0) units.Look();
    copies.Fill();
    WaitForPreviousKernels(rows.Ready());
    if (p.holds_next) LaunchDependents();
  }

  rows.Put(units, !p.pdl);
  rows.ZeroOthers();
  __syncthreads();

  const uint32_t new_at = SharedAddress(new_rows);
  if (writes) cache.Append(slot, new_at);

  WarpAttention<T, C, kSize, kWide> attention(p.scale, new_at, sinks);
  if (!p.pdl) copies.Fill();
  AttendToUnits(cache, copies, slot, new_at, attention);

  // Merges the warps; their sums overwrite their rings.
  WaitCopies<0>();
  __syncthreads();
  auto* merged = reinterpret_cast<float*>(ring);             // [warp, row, kMergedRow]
  float* tops = merged + S::kWarps * kRows * S::kMergedRow;  // [warp, row]
  float* totals = tops + S::kWarps * kRows;
  attention.StorePartial(p.shared, merged, tops, totals);
  __syncthreads();
  StoreSums<T, C, kSize>(p, merged, tops, totals);
}

// Whether this architecture has kernels for 8-bit caches; the others are empty.
#ifdef __CUDA_ARCH__
inline constexpr bool kHasByteCaches = __CUDA_ARCH__ == 10 * kByteCacheCapability;
#else
inline constexpr bool kHasByteCaches = true;
#endif

// T: activations; C: elements of the cache, T or 8 bits. kSize: head size, padded with zeros beyond params.size. kWide:
// more than 8 query heads per key head.
template <typename T, typename C, int kSize, bool kWide>
__global__ void __launch_bounds__(Shape<C, kSize>::kThreads, kHasScales<C> ? kByteCtas : 0)
    AttendKernel(const Params p) {
  if constexpr (!kHasScales<C> || kHasByteCaches) AttendCta<T, C, kSize, kWide>(p);
}

}  // namespace jaxlowbit::attend
