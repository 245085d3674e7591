// SPDX-License-Identifier: Apache-2.0
//
// The device code of attend.cu: copies, products and softmax of a warp, and the reductions over warps and CTAs.
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
//                  NewRows        queries and the new key and value: normalize, rotate, to shared memory
//                  UnitRing       copies kStages - 1 units ahead
//                  WarpAttention  scores, softmax and sums of a unit; the merge of the warps
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/approximate.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/transposed.cuh"
#include "cuda/ops/head_row.cuh"

namespace jaxlowbit::attend {

inline constexpr int kUnit = 16;  // slots per unit, which a warp processes at a time
inline constexpr int kRows = 16;  // query heads of a product, padded with zeros
inline constexpr int kKeyRow = kRows, kValueRow = kRows + 1;  // in shared memory
inline constexpr int kVector = 8;                             // elements of 16 bytes
inline constexpr int kLookahead = 32;                         // units per comparison of positions
inline constexpr int kMaxSplits = 64;
inline constexpr float kLowest =
    -1e30f;  // below all scores; finite, so that differences are not NaN

// The geometry for heads of up to kSize elements.
template <int kSize>
struct Shape {
  static constexpr int kWarps = kSize == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kSize == 64 ? 4 : kSize == 128 ? 3 : 2;
  static constexpr int kRowBytes = 2 * kSize;
  static constexpr int kUnitBytes = kUnit * kRowBytes;  // of keys, and of values
  static constexpr int kRingBytes = kStages * 2 * kUnitBytes;
  static constexpr int kNewRows = kRows + 2;  // queries, the new key and the new value
  static constexpr int kSharedBytes = kWarps * kRingBytes + kNewRows * kRowBytes;
  // Fragments of queries stay in shared memory if registers do not suffice.
  static constexpr bool kQueryInRegisters = kSize < 256;
  static constexpr int kChunks = kSize / kVector;     // of a row
  static constexpr int kCopiedRows = 32 / kChunks;    // by one instruction of a warp
  static constexpr int kMergedRow = kSize + kVector;  // floats; the padding avoids bank conflicts

  // The offset of chunk `at` of row `row`. Chunks are permuted so that 8 rows of a column are in different banks.
  static __device__ int Place(int row, int at) { return row * kRowBytes + (at ^ row % 8) * 16; }
  static_assert(kWarps * kRows * (kMergedRow + 2) * 4 <= kSharedBytes);
};

struct Params {
  const void *query, *key, *value;
  const float *cos, *sin, *query_norm, *key_norm;
  void *keys, *values;
  const int32_t *slot, *position, *positions;
  void* out;
  float* sums;    // [batch * heads, splits, head_size]; null: one split, results go to out
  float2* stats;  // [batch * heads, splits]: the maximum and the sum of weights
  int kv_heads, shared, size;  // key heads, query heads per key head, head size
  int slots, reach, splits;
  int rounds, odd_units;  // each warp has `rounds` units, the first `odd_units` warps one more
  uint32_t max_distance;  // maximum distance of a visible position before the query
  float scale;            // times log2(e)
  float epsilon;
  bool neighbours;  // pairs of the rotation
  bool aligned;     // keys and values of the cache begin at multiples of 16 bytes
  bool pdl;         // as in Attend
};

__device__ inline int Warp() { return threadIdx.x / 32; }
__device__ inline int Lane() { return threadIdx.x % 32; }

// A CTA's key head, part of the slots, and sequence.
__device__ inline int KvHead() { return blockIdx.x; }
__device__ inline int Split() { return blockIdx.y; }
__device__ inline int Element() { return blockIdx.z; }

// The first query head of a CTA, counted over all sequences.
__device__ inline int64_t FirstHead(const Params& p) {
  return static_cast<int64_t>(Element()) * p.kv_heads * p.shared + KvHead() * p.shared;
}

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

// Copies 16 bytes from any element, or zeros if `valid` is false. Synchronous.
__device__ inline void CopyElements(uint32_t shared, const uint16_t* from, bool valid) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (valid) words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
  StoreShared16(shared, make_uint4(words[0], words[1], words[2], words[3]));
}

__device__ inline float QuadMax(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ inline float QuadSum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Iterates over the units of a warp (every `workers`th from `worker` on) that have visible slots.
class Units {
 public:
  __device__ Units(const Params& p, int element, int worker, int workers)
      : positions_(p.positions + static_cast<int64_t>(element) * p.slots),
        position_(p.position[element]),
        reach_(p.reach),
        max_distance_(p.max_distance),
        lane_(threadIdx.x % 32),
        worker_(worker),
        workers_(workers),
        count_(p.rounds + (worker < p.odd_units ? 1 : 0)) {}

  __device__ int count() const { return count_; }
  __device__ int SlotOf(int number) const { return (worker_ + number * workers_) * kUnit; }

  // Returns false at the end, else sets the unit's number and the mask of its visible slots. Unit 0 is always returned
  // first, even if none of its slots is visible.
  __device__ bool Next(int* number, uint32_t* mask) {
    while (left_ == 0) {
      if (next_ >= count_) return false;
      Look();
    }
    const int at = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    *number = next_ - kLookahead + at;
    *mask = __shfl_sync(~0u, mask_, at);
    return true;
  }

  // Computes the masks of the next kLookahead units; lane i keeps the mask of unit i. Call once before the first Next.
  __device__ void Look() {
    constexpr int kLoads = 8;  // at a time, of two units each
    mask_ = 0;
#pragma unroll 1
    for (int first = 0; first < kLookahead && next_ + first < count_; first += 2 * kLoads) {
      int held[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int number = next_ + first + 2 * i + lane_ / kUnit;
        const int slot = SlotOf(number) + lane_ % kUnit;
        held[i] = number < count_ && slot < reach_ ? positions_[slot] : -1;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32_t distance = static_cast<uint32_t>(position_) - held[i];  // wraps if beyond
        const uint32_t two = __ballot_sync(~0u, held[i] >= 0 && distance <= max_distance_);
        if (lane_ / 2 == first / 2 + i) mask_ = lane_ % 2 == 0 ? two & 0xffff : two >> 16;
      }
    }
    left_ = __ballot_sync(~0u, mask_ != 0) | (next_ == 0 ? 1 : 0);
    next_ += kLookahead;
  }

 private:
  const int32_t* positions_;
  int position_, reach_;
  uint32_t max_distance_;
  int lane_, worker_, workers_, count_;
  int next_ = 0;  // first unit without a mask
  uint32_t mask_ = 0, left_ = 0;
};

// Copies keys and values of the CTA's key head from the cache to this warp's ring. A lane copies the same columns of
// several rows.
template <int kSize>
class CacheCopier {
 public:
  using S = Shape<kSize>;

  // `ring`: the shared memory of the CTA.
  __device__ CacheCopier(const Params& p, const uint8_t* ring)
      : p_(p),
        slot_size_(static_cast<int64_t>(p.kv_heads) * p.size),
        chunk_(Lane() % S::kChunks),
        first_row_(Lane() / S::kChunks),
        has_chunk_(chunk_ * kVector < p.size) {
    const int64_t start = static_cast<int64_t>(Element()) * p.slots * slot_size_ +
                          static_cast<int64_t>(KvHead()) * p.size;
    keys_ = static_cast<uint16_t*>(p.keys) + start;
    values_ = static_cast<uint16_t*>(p.values) + start;
    stages_ = SharedAddress(ring) + Warp() * S::kRingBytes;
  }

  __device__ uint32_t Stage(int stage) const { return stages_ + stage * 2 * S::kUnitBytes; }

  // Starts copying the unit that begins with `slot`.
  __device__ void Copy(int stage, int slot) const {
    const uint32_t to = Stage(stage);
    CopyRows(keys_, to, slot);
    CopyRows(values_, to + S::kUnitBytes, slot);
  }

  // Stores the new key and value, which are at `new_rows`, to the cache.
  __device__ void Append(int slot, uint32_t new_rows) const {
#pragma unroll
    for (int i = Lane(); i < 2 * S::kChunks; i += 32) {
      const int at = i % S::kChunks;
      if (at * kVector >= p_.size) continue;
      const uint4 v = LoadShared16(new_rows + S::Place(i < S::kChunks ? kKeyRow : kValueRow, at));
      uint16_t* to = (i < S::kChunks ? keys_ : values_) + slot * slot_size_ + at * kVector;
      if (p_.aligned) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          to[j] = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
      }
    }
  }

  // Stores the new key and value to the copy of their unit, at `unit`.
  __device__ void Insert(uint32_t unit, int slot, uint32_t new_rows) const {
#pragma unroll
    for (int i = Lane(); i < 2 * S::kChunks; i += 32) {
      const int column = i % S::kChunks;
      const uint4 v =
          LoadShared16(new_rows + S::Place(i < S::kChunks ? kKeyRow : kValueRow, column));
      StoreShared16(unit + i / S::kChunks * S::kUnitBytes + S::Place(slot % kUnit, column), v);
    }
    __syncwarp();
  }

  // Zeroes the values of masked slots: their weights are 0, but 0 * NaN would be NaN.
  __device__ void ZeroMasked(uint32_t unit, uint32_t mask) const {
#pragma unroll
    for (int row = first_row_; row < first_row_ + kUnit; row += S::kCopiedRows) {
      if ((mask >> row & 1) == 0) {
        StoreShared16(unit + S::kUnitBytes + S::Place(row, chunk_), make_uint4(0, 0, 0, 0));
      }
    }
    __syncwarp();
  }

 private:
  __device__ void CopyRows(const uint16_t* from, uint32_t to, int slot) const {
    from += (slot + first_row_) * slot_size_ + chunk_ * kVector;
    const auto is_valid = [&](int row) { return has_chunk_ && slot + row < p_.reach; };
    if (p_.aligned) {
#pragma unroll
      for (int row = first_row_; row < first_row_ + kUnit; row += S::kCopiedRows) {
        const bool valid = is_valid(row);
        CopyAsync(to + S::Place(row, chunk_), valid ? from : keys_, valid);
        from += S::kCopiedRows * slot_size_;
      }
    } else {
#pragma unroll 1
      for (int row = first_row_; row < first_row_ + kUnit; row += S::kCopiedRows) {
        CopyElements(to + S::Place(row, chunk_), from, is_valid(row));
        from += S::kCopiedRows * slot_size_;
      }
    }
  }

  const Params& p_;
  const int64_t slot_size_;
  const int chunk_, first_row_;
  const bool has_chunk_;
  uint16_t *keys_, *values_;
  uint32_t stages_;
};

// The queries of the CTA, the new key and the new value: kNewRows rows in shared memory.
template <typename T, int kSize>
class NewRows {
 public:
  using S = Shape<kSize>;
  using Row = HeadRow<T, kSize>;

  __device__ NewRows(const Params& p, uint8_t* shared)
      : p_(p),
        shared_(shared),
        first_head_(FirstHead(p)),
        new_head_(static_cast<int64_t>(Element()) * p.kv_heads + KvHead()),
        rows_(p.shared + 2),
        pairs_{p.size / 2, p.neighbours},
        angles_(pairs_, p.cos + Angle(), p.sin + Angle()) {}

  // Normalizes and rotates the rows, one warp per row. `looks`: `units` compares positions while the first two rows of
  // a warp load.
  __device__ void Put(Units& units, bool looks) {
    const int warp = Warp();
    Row one = Load(warp), two = Load(warp + S::kWarps);
    if (looks && units.count() > 0) units.Look();
    Put(warp, one);
    Put(warp + S::kWarps, two);
    for (int i = warp + 2 * S::kWarps; i < rows_; i += S::kWarps) {
      Row row = Load(i);
      Put(i, row);
    }
  }

  // Zeroes padding rows and columns.
  __device__ void ZeroOthers() const {
    const uint32_t rows = SharedAddress(shared_);
    for (int i = static_cast<int>(threadIdx.x); i < S::kNewRows * S::kChunks; i += S::kThreads) {
      const int row = i / S::kChunks, at = i % S::kChunks;
      const bool held = (row < p_.shared || row >= kRows) && at * kVector < p_.size;
      if (!held) StoreShared16(rows + S::Place(row, at), make_uint4(0, 0, 0, 0));
    }
  }

 private:
  __device__ int64_t Angle() const { return static_cast<int64_t>(Element()) * pairs_.half; }

  // The row of number `i`: queries, then the key and the value.
  __device__ int RowOf(int i) const { return i < p_.shared ? i : kKeyRow + i - p_.shared; }

  __device__ Row Load(int i) const {
    const int row = RowOf(min(i, rows_ - 1));
    const auto* query = static_cast<const T*>(p_.query) + (first_head_ + row) * p_.size;
    const auto* key = static_cast<const T*>(p_.key) + new_head_ * p_.size;
    const auto* value = static_cast<const T*>(p_.value) + new_head_ * p_.size;
    return Row(pairs_,
               row < kRows      ? query
               : row == kKeyRow ? key
                                : value,
               row < kRows      ? p_.query_norm
               : row == kKeyRow ? p_.key_norm
                                : nullptr);
  }

  __device__ void Put(int i, Row& held) const {
    if (i >= rows_) return;
    const int row = RowOf(i);
    held.Widen();
    held.Normalize(p_.epsilon);
    if (row != kValueRow) held.Rotate(angles_);
    held.ForEach([&](int column, T value) {
      const int byte = S::Place(row, column / kVector) + column % kVector * 2;
      *reinterpret_cast<T*>(shared_ + byte) = value;
    });
  }

  const Params& p_;
  uint8_t* const shared_;
  const int64_t first_head_, new_head_;  // of queries; of key and value
  const int rows_;                       // without padding; the last two are key and value
  const Pairs<kSize> pairs_;
  const Angles<kSize> angles_;
};

// Copies units kStages - 1 ahead of the products.
template <int kSize>
class UnitRing {
 public:
  // `written`: the number of this warp's unit with the slot to write, or -1.
  __device__ UnitRing(const CacheCopier<kSize>& cache, Units& units, int written)
      : cache_(cache), units_(units), written_(written) {}

  __device__ int produced() const { return produced_; }

  // Starts copying the first units.
  __device__ void Fill() {
#pragma unroll 1
    for (int stage = 0; stage < Shape<kSize>::kStages - 1; ++stage) Produce(stage);
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
  const CacheCopier<kSize>& cache_;
  Units& units_;
  const int written_;
  uint32_t mask_of_stage_ = 0;  // in lane i: the mask of stage i
  int written_stage_ = -1;      // the stage with the slot to write
  int produced_ = 0;
};

// Online softmax and weighted sums of a warp. kWide: more than 8 query heads per key head.
template <typename T, int kSize, bool kWide>
class WarpAttention {
 public:
  using S = Shape<kSize>;

  // `new_rows`: the address of the queries.
  __device__ WarpAttention(float scale, uint32_t new_rows) : scale_(scale), new_rows_(new_rows) {
    const int lane = Lane();
    matrix_ = lane / 8;
    value_row_ = matrix_ % 2 * 8 + lane % 8;
    key_row_ = matrix_ / 2 * 8 + lane % 8;
    if constexpr (S::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) LoadQuery(step, query_[step]);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) top_[half] = kLowest, total_[half] = 0;
  }

  // Adds the values of the unit at `unit`. `mask`: its visible slots.
  __device__ void Add(uint32_t unit, uint32_t mask) {
    float scores[2][4] = {};  // of slots 8 * j + 2 * t + {0, 1}
    MultiplyKeys(unit, scores);
    uint32_t weights[4] = {};
    OnlineSoftmax(mask, scores, weights);
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
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        *reinterpret_cast<float2*>(merged + own * S::kMergedRow + 8 * n + 2 * t) =
            make_float2(sums_[n][2 * half], sums_[n][2 * half + 1]);
      }
    }
  }

 private:
  static constexpr int kHalves = kWide ? 2 : 1;  // halves of a product's rows with real heads
  static constexpr int kSteps = kSize / 16;

  __device__ void LoadQuery(int step, uint32_t (&fragment)[4]) const {
    LoadMatrices(fragment, new_rows_ + S::Place(value_row_, 2 * step + matrix_ / 2));
  }

  __device__ void MultiplyKeys(uint32_t keys, float (&scores)[2][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      LoadMatrices(b, keys + S::Place(key_row_, 2 * step + matrix_ % 2));
      if constexpr (!S::kQueryInRegisters) LoadQuery(step, query_[0]);
      const uint32_t (&a)[4] = query_[S::kQueryInRegisters ? step : 0];
      Mma<T>(scores[0], a, b[0], b[1]);
      Mma<T>(scores[1], a, b[2], b[3]);
    }
  }

  // Converts scores to weights, as a fragment, and rescales the sums to the new maximum.
  __device__ void OnlineSoftmax(uint32_t mask, const float (&scores)[2][4],
                                uint32_t (&weights)[4]) {
    const int t = Lane() % 4;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float highest = top_[half], weight[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool visible = mask >> (j / 2 * 8 + 2 * t + j % 2) & 1;
        weight[j] = visible ? scores[j / 2][2 * half + j % 2] * scale_ : -INFINITY;
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
      }
      weights[half] = Pack<T>(weight[0], weight[1]);
      weights[2 + half] = Pack<T>(weight[2], weight[3]);
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        sums_[n][2 * half] *= factor;
        sums_[n][2 * half + 1] *= factor;
      }
    }
  }

  __device__ void AddValues(uint32_t values, const uint32_t (&weights)[4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      LoadTransposed(b, values + S::Place(value_row_, 2 * step + matrix_ / 2));
      Mma<T>(sums_[2 * step], weights, b[0], b[1]);
      Mma<T>(sums_[2 * step + 1], weights, b[2], b[3]);
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
template <typename T, int kSize>
__device__ void StoreSums(const Params& p, const float* merged, const float* tops,
                          const float* totals) {
  using S = Shape<kSize>;
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
template <typename T, int kSize, bool kWide>
__device__ void AttendToUnits(const CacheCopier<kSize>& cache, UnitRing<kSize>& ring, int slot,
                              uint32_t new_rows, WarpAttention<T, kSize, kWide>& attention) {
  using S = Shape<kSize>;
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
    if (mask != 0xffff) cache.ZeroMasked(unit, mask);
    attention.Add(unit, mask);
    __syncwarp();  // the stage has been read
  }
}

// kSize: head size, padded with zeros beyond params.size. kWide: more than 8 query heads per key head.
template <typename T, int kSize, bool kWide>
__global__ void __launch_bounds__(Shape<kSize>::kThreads) AttendKernel(const Params p) {
  using S = Shape<kSize>;
  extern __shared__ __align__(128) uint8_t ring[];
  LaunchDependents();
  const CacheCopier<kSize> cache(p, ring);
  const int slot = *p.slot;
  const int worker = Warp() * p.splits + Split();
  const int workers = p.splits * S::kWarps;
  Units units(p, Element(), worker, workers);
  if (units.count() > 0) cache.Copy(0, units.SlotOf(0));  // before positions are compared

  // This warp's unit with the slot to write, or none.
  const bool writes = 0 <= slot && slot < p.slots && slot / kUnit % workers == worker;
  const int written = writes ? slot / kUnit / workers : -1;
  UnitRing<kSize> copies(cache, units, written);
  uint8_t* const new_rows = ring + S::kWarps * S::kRingBytes;
  NewRows<T, kSize> rows(p, new_rows);
  if (p.pdl) {  // old slots arrive while previous kernels compute the new rows
    if (units.count() > 0) units.Look();
    copies.Fill();
    WaitForPreviousKernels();
  }

  rows.Put(units, !p.pdl);
  rows.ZeroOthers();
  __syncthreads();

  const uint32_t new_at = SharedAddress(new_rows);
  if (writes) cache.Append(slot, new_at);

  WarpAttention<T, kSize, kWide> attention(p.scale, new_at);
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
  StoreSums<T, kSize>(p, merged, tops, totals);
}

}  // namespace jaxlowbit::attend
