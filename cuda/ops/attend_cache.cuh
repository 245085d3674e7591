// SPDX-License-Identifier: Apache-2.0
//
// The cache of attend.cuh: geometry, masks of visible slots, and copies between the cache and shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/copy.cuh"

namespace jaxlowbit::attend {

inline constexpr int kUnit = 16;       // slots per unit, which a warp processes at a time
inline constexpr int kRows = 16;       // query heads of a product, padded with zeros
inline constexpr int kLookahead = 32;  // units per comparison of positions
inline constexpr int kMaxSplits = 64;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLowest =
    -1e30f;  // below all scores; finite, so that differences are not NaN

// Whether the cache has 8-bit elements with a scale per slot and head.
template <typename C>
inline constexpr bool kHasScales = sizeof(C) == 1;

// CTAs on an SM at a time, at least, if the cache has 8-bit elements.
inline constexpr int kByteCtas = 3;

// The geometry for heads of up to kSize elements, and caches of C.
template <typename C, int kSize>
struct Shape {
  static constexpr int kVector = 16 / sizeof(C);  // elements of 16 bytes
  static constexpr int kWarps = kSize == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  // CTAs on an SM of Hopper at a time.
  static constexpr int kCtas = kHasScales<C> ? kByteCtas : kSize == 128 ? 2 : 3;
  static constexpr int kStages = kSize == 64 ? 4 : kSize == 128 ? 3 : 2;
  static constexpr int kRowBytes = sizeof(C) * kSize;
  static constexpr int kUnitBytes = kUnit * kRowBytes;  // of keys, and of values
  static constexpr int kScaleBytes = kHasScales<C> ? kUnit * 4 : 0;
  // Keys, values, their scales.
  static constexpr int kStageBytes = 2 * kUnitBytes + 2 * kScaleBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  // Queries; the new key and value; their scales.
  static constexpr int kQueryBytes = kRows * 2 * kSize;
  static constexpr int kNewScales = kQueryBytes + 2 * kRowBytes;
  static constexpr int kSharedBytes = kWarps * kRingBytes + kNewScales + (kHasScales<C> ? 16 : 0);
  // Fragments of queries stay in shared memory if registers do not suffice.
  static constexpr bool kQueryInRegisters = kSize < 256;
  static constexpr int kChunks = kSize / kVector;   // of a row
  static constexpr int kCopiedRows = 32 / kChunks;  // by one instruction of a warp
  static constexpr int kMergedRow = kSize + 8;      // floats; the padding avoids bank conflicts

  // The offset of chunk `at` of row `row`. Chunks are permuted so that 8 rows of a column are in different banks.
  static __device__ int Place(int row, int at) {
    constexpr int kRowsOfBanks = kChunks < 8 ? 8 / kChunks : 1;
    return row * kRowBytes + (at ^ row / kRowsOfBanks % (8 / kRowsOfBanks)) * 16;
  }
  // QueryPlace is the offset in the queries, NewPlace in the new key (row 0) and value (row 1), which follow them.
  static __device__ int QueryPlace(int row, int at) {
    return row * 2 * kSize + (at ^ row % 8) * 16;
  }
  static __device__ int NewPlace(int row, int at) { return kQueryBytes + Place(row, at); }
  static_assert(kWarps * kRows * (kMergedRow + 2) * 4 <= kSharedBytes);
};

struct Params {
  const void *query, *key, *value;
  const float *cos, *sin, *query_norm, *key_norm;
  const float *query_bias, *key_bias, *value_bias, *sinks;
  void *keys, *values;
  float *key_scales, *value_scales;
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
  bool holds_next;  // likewise
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

// Copies 16 bytes from any element, or zeros if `valid` is false. Synchronous.
template <typename E>
__device__ void CopyElements(uint32_t shared, const E* from, bool valid) {
  constexpr int kInWord = 4 / sizeof(E);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4 * kInWord; ++i) {
    if (valid)
      words[i / kInWord] |= static_cast<uint32_t>(from[i]) << 8 * sizeof(E) * (i % kInWord);
  }
  StoreShared16(shared, make_uint4(words[0], words[1], words[2], words[3]));
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
template <typename C, int kSize>
class CacheCopier {
 public:
  using S = Shape<C, kSize>;
  using E = std::conditional_t<sizeof(C) == 1, uint8_t, uint16_t>;

  // `ring`: the shared memory of the CTA.
  __device__ CacheCopier(const Params& p, const uint8_t* ring)
      : p_(p),
        slot_size_(static_cast<int64_t>(p.kv_heads) * p.size),
        chunk_(Lane() % S::kChunks),
        first_row_(Lane() / S::kChunks),
        has_chunk_(chunk_ * S::kVector < p.size) {
    const int64_t start = static_cast<int64_t>(Element()) * p.slots * slot_size_ +
                          static_cast<int64_t>(KvHead()) * p.size;
    keys_ = static_cast<E*>(p.keys) + start;
    values_ = static_cast<E*>(p.values) + start;
    stages_ = SharedAddress(ring) + Warp() * S::kRingBytes;
  }

  __device__ uint32_t Stage(int stage) const { return stages_ + stage * S::kStageBytes; }

  // Starts copying the unit that begins with `slot`.
  __device__ void Copy(int stage, int slot) const {
    const uint32_t to = Stage(stage);
    CopyRows(keys_, to, slot);
    CopyRows(values_, to + S::kUnitBytes, slot);
    if constexpr (kHasScales<C>) {  // of keys, then of values
      static_assert(2 * kUnit == 32);
      const int own = slot + Lane() % kUnit;
      const float* from = Lane() < kUnit ? p_.key_scales : p_.value_scales;
      const bool valid = own < p_.reach;
      CopyAsync4(to + 2 * S::kUnitBytes + 4 * Lane(), from + ScaleAt(valid ? own : 0), valid);
    }
  }

  // Stores the new key and value, which follow the queries at `new_rows`, to the cache.
  __device__ void Append(int slot, uint32_t new_rows) const {
#pragma unroll
    for (int i = Lane(); i < 2 * S::kChunks; i += 32) {
      const int at = i % S::kChunks;
      if (at * S::kVector >= p_.size) continue;
      const uint4 v = LoadShared16(new_rows + S::NewPlace(i / S::kChunks, at));
      E* to = (i < S::kChunks ? keys_ : values_) + slot * slot_size_ + at * S::kVector;
      if (p_.aligned) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        constexpr int kInWord = 4 / sizeof(E);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < S::kVector; ++j)
          to[j] = static_cast<E>(words[j / kInWord] >> 8 * sizeof(E) * (j % kInWord));
      }
    }
    if constexpr (kHasScales<C>) {
      float* to = Lane() == 0 ? p_.key_scales : p_.value_scales;
      if (Lane() < 2) to[ScaleAt(slot)] = NewScale(new_rows);
    }
  }

  // Stores the new key and value to the copy of their unit, at `unit`.
  __device__ void Insert(uint32_t unit, int slot, uint32_t new_rows) const {
    const int row = slot % kUnit;
#pragma unroll
    for (int i = Lane(); i < 2 * S::kChunks; i += 32) {
      const int at = i % S::kChunks;
      const uint4 v = LoadShared16(new_rows + S::NewPlace(i / S::kChunks, at));
      StoreShared16(unit + i / S::kChunks * S::kUnitBytes + S::Place(row, at), v);
    }
    if constexpr (kHasScales<C>) {
      const uint32_t to = unit + 2 * S::kUnitBytes + Lane() * S::kScaleBytes + 4 * row;
      if (Lane() < 2) StoreShared4(to, __float_as_uint(NewScale(new_rows)));
    }
    __syncwarp();
  }

  // Zeroes the values of masked slots: their weights are 0, but 0 * NaN would be NaN. 8-bit values are finite.
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
  // The index of the scale of a slot.
  __device__ int64_t ScaleAt(int slot) const {
    return (static_cast<int64_t>(Element()) * p_.slots + slot) * p_.kv_heads + KvHead();
  }

  // The scale of the new key in lane 0, and of the new value in lane 1.
  __device__ float NewScale(uint32_t new_rows) const {
    return __uint_as_float(LoadShared4(new_rows + S::kNewScales + 4 * (Lane() % 2)));
  }

  __device__ void CopyRows(const E* from, uint32_t to, int slot) const {
    from += (slot + first_row_) * slot_size_ + chunk_ * S::kVector;
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
  E *keys_, *values_;
  uint32_t stages_;
};

}  // namespace jaxlowbit::attend
