// SPDX-License-Identifier: Apache-2.0
//
// attend: rotates a query, a key and a value of each sequence, appends to a cache, and attends (attend.h).
//
// Bound. Memory: keys and values are read once, for all the query heads that share them, which are rows of products on
// tensor cores. A CTA works for one key head on one part of the slots. Each of its warps takes units of 16 slots by
// itself, with a ring of copies, a running maximum, a running sum and accumulators of its own, so the loop has no
// barrier. Units are dealt out in turn, so that a cache of which only the first slots are in use keeps all CTAs busy,
// and units without a slot that the query sees are not read. The warps of a CTA meet at the end in shared memory, and
// the CTAs of a key head in CombineKernel, by way of the workspace: both add in a fixed order.
//
// Every CTA rotates its queries and the new key, and keeps them and the new value in shared memory. The warp whose unit
// has the slot that is written puts key and value into the cache, and into the copy of the unit that it multiplies, so
// that no CTA reads from memory what another writes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "cuda/device/approximate.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/transposed.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/attend.h"
#include "cuda/ops/head_row.cuh"

namespace jaxlowbit {
namespace {

constexpr int kUnit = 16;       // slots that a warp takes at a time
constexpr int kRows = 16;       // query heads of a product; those above the real ones are zeros
constexpr int kVector = 8;      // elements of 16 bytes
constexpr int kLookahead = 32;  // units whose positions are compared at a time, one for each lane
constexpr int kMaxSplits = 64;
constexpr float kLowest = -1e30f;  // below every score, and finite: differences of two are no NaN

constexpr int kCombineThreads = 128;
constexpr int kCombineWarps = kCombineThreads / 32;
constexpr int kCombineColumns = 128;  // of a CTA: a vector of 4 for each lane
constexpr int kHeld = 8;              // splits that a warp of CombineKernel loads at a time

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
  // Fragments of queries stay in shared memory where there are no registers for them.
  static constexpr bool kHoldsQuery = kSize < 256;
  static constexpr int kChunks = kSize / kVector;     // of a row
  static constexpr int kCopiedRows = 32 / kChunks;    // by one instruction of a warp
  static constexpr int kMergedRow = kSize + kVector;  // floats; the padding avoids bank conflicts
  static_assert(kWarps * kRows * (kMergedRow + 2) * 4 <= kSharedBytes);
};

struct Params {
  const void *query, *key, *value;
  const float *cos, *sin, *query_norm, *key_norm;
  void *keys, *values;
  const int32_t *slot, *position, *positions;
  void* out;
  float*
      sums;  // [batch * heads, splits, head_size], or null: there is one split, and results go to out
  float2* stats;               // [batch * heads, splits]: the maximum and the sum of weights
  int kv_heads, shared, size;  // heads of keys, heads of the query that share one, their elements
  int slots, reach, splits;
  int rounds, odd_units;  // each warp has so many units, and the first of them one more
  uint32_t farthest;      // how many positions before its own a query sees
  float scale;            // times log2(e)
  float epsilon;
  bool neighbours;  // pairs of the rotation
  bool aligned;     // keys and values of the cache begin at multiples of 16 bytes
};

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

// Copies 16 bytes from any element, or zeros if `valid` is false. Done when the instructions are.
__device__ inline void CopyElements(uint32_t shared, const uint16_t* from, bool valid) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (valid) words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
  StoreShared16(shared, make_uint4(words[0], words[1], words[2], words[3]));
}

__device__ inline float MaxOfQuad(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ inline float SumOfQuad(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// The units of a warp: every `workers`th from `worker` on. Next finds those with slots that the query sees.
class Units {
 public:
  __device__ Units(const Params& p, int element, int worker, int workers)
      : positions_(p.positions + static_cast<int64_t>(element) * p.slots),
        position_(p.position[element]),
        reach_(p.reach),
        farthest_(p.farthest),
        lane_(threadIdx.x % 32),
        worker_(worker),
        workers_(workers),
        count_(p.rounds + (worker < p.odd_units ? 1 : 0)) {}

  __device__ int count() const { return count_; }
  __device__ int SlotOf(int number) const { return (worker_ + number * workers_) * kUnit; }

  // Whether there is another unit; then its number, and which of its slots the query sees, a bit each. The first is
  // unit 0 whatever it sees.
  __device__ bool Next(int* number, uint32_t* seen) {
    while (left_ == 0) {
      if (next_ >= count_) return false;
      Look();
    }
    const int at = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    *number = next_ - kLookahead + at;
    *seen = __shfl_sync(~0u, seen_, at);
    return true;
  }

  // Compares the positions of the next units: lane i keeps the bits of the i-th. The first time before Next.
  __device__ void Look() {
    constexpr int kLoads = 8;  // at a time, of two units each
    seen_ = 0;
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
        const uint32_t two = __ballot_sync(~0u, held[i] >= 0 && distance <= farthest_);
        if (lane_ / 2 == first / 2 + i) seen_ = lane_ % 2 == 0 ? two & 0xffff : two >> 16;
      }
    }
    left_ = __ballot_sync(~0u, seen_ != 0) | (next_ == 0 ? 1 : 0);
    next_ += kLookahead;
  }

 private:
  const int32_t* positions_;
  int position_, reach_;
  uint32_t farthest_;
  int lane_, worker_, workers_, count_;
  int next_ = 0;  // the first unit that was not compared
  uint32_t seen_ = 0, left_ = 0;
};

// kSize: elements of a head, those above params.size zeros. kWide: more than 8 heads share keys.
template <typename T, int kSize, bool kWide>
__global__ void __launch_bounds__(Shape<kSize>::kThreads) AttendKernel(const Params p) {
  using S = Shape<kSize>;
  constexpr int kHalves = kWide ? 2 : 1;  // of the rows of a product that hold real heads
  constexpr int kSteps = kSize / 16;
  extern __shared__ __align__(128) uint8_t ring[];
  LaunchDependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // row and pair of columns of a fragment
  const int kv_head = blockIdx.x, split = blockIdx.y, element = blockIdx.z;

  // Copies of a unit's keys and values: a lane copies the same columns of several rows.
  const int64_t slot_size = static_cast<int64_t>(p.kv_heads) * p.size;
  const int chunk = lane % S::kChunks, first_row = lane / S::kChunks;
  const bool has_chunk = chunk * kVector < p.size;
  const int64_t start =
      static_cast<int64_t>(element) * p.slots * slot_size + static_cast<int64_t>(kv_head) * p.size;
  auto* keys = static_cast<uint16_t*>(p.keys) + start;
  auto* values = static_cast<uint16_t*>(p.values) + start;
  const uint32_t stages = SharedAddress(ring) + warp * S::kRingBytes;
  // Rows of 16-byte chunks, which are permuted so that 8 rows of a column lie in different banks.
  const auto place = [](int row, int at) { return row * S::kRowBytes + (at ^ row % 8) * 16; };
  const auto copy_rows = [&](const uint16_t* from, uint32_t to, int slot) {
    from += (slot + first_row) * slot_size + chunk * kVector;
    const auto is_valid = [&](int row) { return has_chunk && slot + row < p.reach; };
    if (p.aligned) {
#pragma unroll
      for (int row = first_row; row < first_row + kUnit; row += S::kCopiedRows) {
        const bool valid = is_valid(row);
        CopyAsync(to + place(row, chunk), valid ? from : keys, valid);
        from += S::kCopiedRows * slot_size;
      }
    } else {
#pragma unroll 1
      for (int row = first_row; row < first_row + kUnit; row += S::kCopiedRows) {
        CopyElements(to + place(row, chunk), from, is_valid(row));
        from += S::kCopiedRows * slot_size;
      }
    }
  };
  const auto copy = [&](int stage, int slot) {
    const uint32_t to = stages + stage * 2 * S::kUnitBytes;
    copy_rows(keys, to, slot);
    copy_rows(values, to + S::kUnitBytes, slot);
  };

  const int slot = *p.slot;
  const int worker = warp * p.splits + split, workers = p.splits * S::kWarps;
  Units units(p, element, worker, workers);
  if (units.count() > 0) copy(0, units.SlotOf(0));  // before it is known whether it is seen

  // Queries, the new key and the new value.
  const int64_t first_head =
      static_cast<int64_t>(element) * p.kv_heads * p.shared + kv_head * p.shared;
  const int64_t new_head = static_cast<int64_t>(element) * p.kv_heads + kv_head;
  constexpr int kKeyRow = kRows, kValueRow = kRows + 1;
  uint8_t* const new_rows = ring + S::kWarps * S::kRingBytes;
  const int rows = p.shared + 2;  // the last two are those of key and value
  const auto row_of = [&](int i) { return i < p.shared ? i : kKeyRow + i - p.shared; };
  const Pairs<kSize> pairs = {p.size / 2, p.neighbours};
  const auto load = [&](int i) {
    const int row = row_of(min(i, rows - 1));
    const auto* query = static_cast<const T*>(p.query) + (first_head + row) * p.size;
    const auto* key = static_cast<const T*>(p.key) + new_head * p.size;
    const auto* value = static_cast<const T*>(p.value) + new_head * p.size;
    return HeadRow<T, kSize>(pairs,
                             row < kRows      ? query
                             : row == kKeyRow ? key
                                              : value,
                             row < kRows      ? p.query_norm
                             : row == kKeyRow ? p.key_norm
                                              : nullptr);
  };
  const int64_t angle = static_cast<int64_t>(element) * pairs.half;
  const Angles<kSize> angles(pairs, p.cos + angle, p.sin + angle);
  const auto put = [&](int i, HeadRow<T, kSize>& held) {
    if (i >= rows) return;
    const int row = row_of(i);
    held.Widen();
    held.Normalize(p.epsilon);
    if (row != kValueRow) held.Rotate(angles);
    held.ForEach([&](int column, T value) {
      const int byte = place(row, column / kVector) + column % kVector * 2;
      *reinterpret_cast<T*>(new_rows + byte) = value;
    });
  };
  HeadRow<T, kSize> one = load(warp), two = load(warp + S::kWarps);
  if (units.count() > 0) units.Look();  // waits for positions, while the rows come
  put(warp, one);
  put(warp + S::kWarps, two);
  for (int i = warp + 2 * S::kWarps; i < rows; i += S::kWarps) {
    HeadRow<T, kSize> row = load(i);
    put(i, row);
  }
  const uint32_t new_at = SharedAddress(new_rows);
  for (int i = static_cast<int>(threadIdx.x); i < S::kNewRows * S::kChunks; i += S::kThreads) {
    const int row = i / S::kChunks, at = i % S::kChunks;
    const bool held = (row < p.shared || row >= kRows) && at * kVector < p.size;
    if (!held) StoreShared16(new_at + place(row, at), make_uint4(0, 0, 0, 0));
  }
  __syncthreads();

  // The unit of this warp that has the slot which is written, or none.
  const bool writes = 0 <= slot && slot < p.slots && slot / kUnit % workers == worker;
  const int written = writes ? slot / kUnit / workers : -1;
  if (writes) {
#pragma unroll
    for (int i = lane; i < 2 * S::kChunks; i += 32) {
      const int at = i % S::kChunks;
      if (at * kVector >= p.size) continue;
      const uint4 v = LoadShared16(new_at + place(i < S::kChunks ? kKeyRow : kValueRow, at));
      uint16_t* to = (i < S::kChunks ? keys : values) + slot * slot_size + at * kVector;
      if (p.aligned) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          to[j] = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
      }
    }
  }

  // The rows of a lane's matrix for ldmatrix: those of A, and of values, and those of keys.
  const int matrix = lane / 8;
  const int value_row = matrix % 2 * 8 + lane % 8, key_row = matrix / 2 * 8 + lane % 8;
  const auto load_query = [&](int step, uint32_t (&fragment)[4]) {
    LoadMatrices(fragment, new_at + place(value_row, 2 * step + matrix / 2));
  };
  uint32_t query[S::kHoldsQuery ? kSteps : 1][4];
  if constexpr (S::kHoldsQuery) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_query(step, query[step]);
  }

  uint32_t seen_of_stage = 0;  // of the unit in the stage with the number of this lane
  int written_stage = -1;      // which has the unit with the slot that is written
  int produced = 0;
  const auto produce = [&](int stage) {
    int number;
    uint32_t seen;
    if (units.Next(&number, &seen)) {
      if (number > 0) copy(stage, units.SlotOf(number));
      if (lane == stage) seen_of_stage = seen;
      if (number == written) written_stage = stage;
      ++produced;
    }
    CommitCopies();
  };

  float top[kHalves], total[kHalves], sums[2 * kSteps][4] = {};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) top[half] = kLowest, total[half] = 0;
  int stage = 0, filled = 0;
#pragma unroll 1
  for (int i = 1 - S::kStages; i < produced; ++i) {  // fills the ring first
    produce(filled);
    filled = filled + 1 == S::kStages ? 0 : filled + 1;
    if (i < 0) continue;
    WaitCopies<S::kStages - 1>();
    __syncwarp();  // the copies of all lanes are there
    const uint32_t seen = __shfl_sync(~0u, seen_of_stage, stage);
    const uint32_t at = stages + stage * 2 * S::kUnitBytes;
    const bool has_written = stage == written_stage;
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
    if (has_written) {
      written_stage = -1;
#pragma unroll
      for (int i = lane; i < 2 * S::kChunks; i += 32) {
        const int column = i % S::kChunks;
        const uint4 v = LoadShared16(new_at + place(i < S::kChunks ? kKeyRow : kValueRow, column));
        StoreShared16(at + i / S::kChunks * S::kUnitBytes + place(slot % kUnit, column), v);
      }
      __syncwarp();
    }
    if (seen == 0) continue;
    if (seen != 0xffff) {  // the weights of other slots are zeros, which times NaN were NaN
#pragma unroll
      for (int row = first_row; row < first_row + kUnit; row += S::kCopiedRows) {
        if ((seen >> row & 1) == 0) {
          StoreShared16(at + S::kUnitBytes + place(row, chunk), make_uint4(0, 0, 0, 0));
        }
      }
      __syncwarp();
    }

    float scores[2][4] = {};  // of slots 8 * j + 2 * t + {0, 1}
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      LoadMatrices(b, at + place(key_row, 2 * step + matrix % 2));
      if constexpr (!S::kHoldsQuery) load_query(step, query[0]);
      const uint32_t (&a)[4] = query[S::kHoldsQuery ? step : 0];
      Mma<T>(scores[0], a, b[0], b[1]);
      Mma<T>(scores[1], a, b[2], b[3]);
    }
    uint32_t weights[4] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float highest = top[half], weight[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool sees = seen >> (j / 2 * 8 + 2 * t + j % 2) & 1;
        weight[j] = sees ? scores[j / 2][2 * half + j % 2] * p.scale : -INFINITY;
        highest = fmaxf(highest, weight[j]);
      }
      highest = MaxOfQuad(highest);
      const float factor = Exp2(top[half] - highest);
      top[half] = highest;
      total[half] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weight[j] = Exp2(weight[j] - highest);
        total[half] += weight[j];
      }
      weights[half] = Pack<T>(weight[0], weight[1]);
      weights[2 + half] = Pack<T>(weight[2], weight[3]);
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        sums[n][2 * half] *= factor;
        sums[n][2 * half + 1] *= factor;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      LoadTransposed(b, at + S::kUnitBytes + place(value_row, 2 * step + matrix / 2));
      Mma<T>(sums[2 * step], weights, b[0], b[1]);
      Mma<T>(sums[2 * step + 1], weights, b[2], b[3]);
    }
    __syncwarp();  // the stage has been read
  }

  // The warps meet: what they hold lies over their rings.
  WaitCopies<0>();
  __syncthreads();
  auto* merged = reinterpret_cast<float*>(ring);             // [warp, row, kMergedRow]
  float* tops = merged + S::kWarps * kRows * S::kMergedRow;  // [warp, row]
  float* totals = tops + S::kWarps * kRows;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = g + 8 * half;
    const float sum = SumOfQuad(total[half]);
    if (row >= p.shared) continue;
    const int own = warp * kRows + row;
    if (t == 0) tops[own] = top[half], totals[own] = sum;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      *reinterpret_cast<float2*>(merged + own * S::kMergedRow + 8 * n + 2 * t) =
          make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
    }
  }
  __syncthreads();
  for (int row = warp; row < p.shared; row += S::kWarps) {
    float highest = kLowest, sum = 0, factors[S::kWarps];
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) highest = fmaxf(highest, tops[w * kRows + row]);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      factors[w] = Exp2(tops[w * kRows + row] - highest);
      sum += factors[w] * totals[w * kRows + row];
    }
    const int64_t head = first_head + row;
    const int64_t part = head * p.splits + split;
    const float whole = sum == 0 ? 0 : 1 / sum;  // a query that sees nothing: sums are zeros
    for (int column = lane; column < p.size; column += 32) {
      float value = 0;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) {
        value += factors[w] * merged[(w * kRows + row) * S::kMergedRow + column];
      }
      // Over the query, if anywhere: this CTA has read it, and no other reads those heads when there is one split.
      if (p.sums == nullptr) {
        static_cast<T*>(p.out)[head * p.size + column] = T(value * whole);
      } else {
        p.sums[part * p.size + column] = value;
      }
    }
    if (p.sums != nullptr && lane == 0) p.stats[part] = make_float2(highest, sum);
  }
}

// out[row] = the splits of a head added up; out may lie over the query, which AttendKernel has read.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const float* sums, const float2* stats, T* out, int splits, int size) {
  __shared__ float4 merged[kCombineWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kCombineColumns + 4 * lane;
  const float* first = sums + row * splits * size + column;
  WaitForPreviousKernels();
  // Warp w adds splits w, w + 4, ...: the first of them are loaded before their factors are known.
  float4 held[kHeld];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int split = begin + i * kCombineWarps + warp;
      held[i] = split < splits && column < size
                    ? *reinterpret_cast<const float4*>(first + split * size)
                    : make_float4(0, 0, 0, 0);
    }
  };
  load(0);
  float factors[kMaxSplits / 32], highest = kLowest, total = 0;  // of splits lane, lane + 32
  float2 own[kMaxSplits / 32];
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = 32 * i + lane;
    own[i] = split < splits ? stats[row * splits + split] : make_float2(kLowest, 0);
    highest = fmaxf(highest, own[i].x);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, lanes));
  }
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    factors[i] = Exp2(own[i].x - highest);
    total += factors[i] * own[i].y;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);

  static_assert(kHeld * kCombineWarps == 32);
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int pass = 0; pass < kMaxSplits / 32; ++pass) {
    if (32 * pass >= splits) break;
    if (pass > 0) load(32 * pass);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float factor = __shfl_sync(~0u, factors[pass], i * kCombineWarps + warp);
      sum.x += factor * held[i].x;
      sum.y += factor * held[i].y;
      sum.z += factor * held[i].z;
      sum.w += factor * held[i].w;
    }
  }
  merged[warp][lane] = sum;
  __syncthreads();
  const float whole = total == 0 ? 0 : 1 / total;
  const auto* floats = reinterpret_cast<const float*>(merged);
  const int own_column = blockIdx.y * kCombineColumns + threadIdx.x;
  if (own_column >= size) return;
  float value = 0;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) value += floats[w * kCombineColumns + threadIdx.x];
  out[row * size + own_column] = T(value * whole);
}
static_assert(kCombineThreads == kCombineColumns);

using KernelFunction = void (*)(Params);

// The devices on which a kernel is loaded, a bit each.
template <typename T, int kSize, bool kWide>
std::atomic<uint64_t> loaded_on{0};

// A kernel and how it is launched.
struct Variant {
  KernelFunction kernel;
  int warps, shared_bytes;
  std::atomic<uint64_t>* loaded;
};

template <typename T, int kSize, bool kWide>
Variant Of() {
  using S = Shape<kSize>;
  return {AttendKernel<T, kSize, kWide>, S::kWarps, S::kSharedBytes, &loaded_on<T, kSize, kWide>};
}
template <typename T, int kSize>
Variant Of(bool wide) {
  return wide ? Of<T, kSize, true>() : Of<T, kSize, false>();
}
template <typename T>
Variant Of(int64_t head_size, bool wide) {
  return head_size <= 64 ? Of<T, 64>(wide) : head_size <= 128 ? Of<T, 128>(wide) : Of<T, 256>(wide);
}
Variant Find(ElementType type, int64_t head_size, bool wide) {
  return type == ElementType::kBf16 ? Of<__nv_bfloat16>(head_size, wide)
                                    : Of<__half>(head_size, wide);
}
Variant Find(const Attend& attend) {
  return Find(attend.type, attend.head_size, attend.shared() > 8);
}

int64_t PartialBytes(const Attend& attend) {  // of one split
  return attend.batch * attend.heads * (attend.head_size + 2) * int64_t{sizeof(float)};
}

template <typename T>
cudaError_t Combine(const Attend& attend, const Params& params, const Device& device,
                    cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(attend.batch * attend.heads),
                  static_cast<unsigned>(CeilDiv(attend.head_size, kCombineColumns)));
  const LaunchConfig launch(grid, kCombineThreads, 0, stream, device.compute_capability >= 90);
  const float* sums = params.sums;
  const float2* stats = params.stats;
  return cudaLaunchKernelEx(&launch.config, CombineKernel<T>, sums, stats,
                            static_cast<T*>(params.out), params.splits, params.size);
}

}  // namespace

// Counts what a CTA's warps take one after the other, in units: those of the slots, one to start, and one for the
// second kernel; a fraction of one, below, for the splits that it adds. A CTA on each multiprocessor reads as fast as
// several: with more of them all take longer.
int AttendSplits(const Attend& attend, const Device& device, int64_t workspace_bytes) {
  if (attend.batch == 0) return 1;
  const Variant variant = Find(attend);
  const int64_t pairs = attend.batch * attend.kv_heads;
  const int64_t units = std::max<int64_t>(CeilDiv(attend.reach, kUnit), 1);
  const int64_t most = std::min<int64_t>(
      {kMaxSplits, CeilDiv(units, variant.warps), workspace_bytes / PartialBytes(attend)});
  int64_t best = 1, least = 0;
  for (int64_t splits = 1; splits <= std::max<int64_t>(most, 1); ++splits) {
    const int64_t turns = CeilDiv(units, variant.warps * splits) + 1;
    const int64_t ctas = std::max<int64_t>(pairs * splits, device.num_sms);
    const int64_t cost =
        ctas * turns * kMaxSplits / device.num_sms + (splits > 1 ? kMaxSplits + splits : 0);
    if (splits == 1 || cost < least) best = splits, least = cost;
  }
  return static_cast<int>(best);
}

cudaError_t LoadAttend(const Attend& attend, const Device& device) {
  const Variant variant = Find(attend);
  const uint64_t bit = uint64_t{1} << device.ordinal % 64;
  if (variant.loaded->load(std::memory_order_acquire) & bit) return cudaSuccess;
  const auto* kernel = reinterpret_cast<const void*>(variant.kernel);
  const auto* combine = attend.type == ElementType::kBf16
                            ? reinterpret_cast<const void*>(CombineKernel<__nv_bfloat16>)
                            : reinterpret_cast<const void*>(CombineKernel<__half>);
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(device.ordinal);
  if (error == cudaSuccess) error = PreferSharedMemory(kernel);
  if (error == cudaSuccess) error = AllowSharedMemory(kernel, variant.shared_bytes);
  if (error == cudaSuccess) error = PreferSharedMemory(combine);
  const cudaError_t restored = cudaSetDevice(current);
  if (error == cudaSuccess) error = restored;
  if (error == cudaSuccess) variant.loaded->fetch_or(bit, std::memory_order_release);
  return error;
}

// The first kernel launches without PDL: kernels before the call may have written what it reads.
cudaError_t LaunchAttend(const Attend& attend, void* workspace, int64_t workspace_bytes,
                         const Device& device, cudaStream_t stream) {
  if (attend.batch == 0) return cudaSuccess;
  constexpr float kLog2E = 1.4426950408889634f;
  const int splits = AttendSplits(attend, device, workspace_bytes);
  const int64_t rows = attend.batch * attend.heads;
  Params params = {};
  params.query = attend.query, params.key = attend.key, params.value = attend.value;
  params.cos = attend.cos, params.sin = attend.sin;
  params.query_norm = attend.query_norm, params.key_norm = attend.key_norm;
  params.epsilon = attend.epsilon, params.neighbours = attend.neighbours;
  params.keys = attend.keys, params.values = attend.values, params.slot = attend.slot;
  params.position = attend.position, params.positions = attend.positions;
  params.out = attend.out;
  if (splits > 1) {
    params.sums = static_cast<float*>(workspace);
    params.stats = reinterpret_cast<float2*>(params.sums + rows * splits * attend.head_size);
  }
  params.kv_heads = static_cast<int>(attend.kv_heads);
  params.shared = static_cast<int>(attend.shared());
  params.size = static_cast<int>(attend.head_size);
  params.slots = static_cast<int>(attend.slots);
  params.reach = static_cast<int>(attend.reach);
  params.splits = splits;
  constexpr int64_t kFarthest = std::numeric_limits<int32_t>::max();
  params.farthest = static_cast<uint32_t>(
      attend.window == 0 ? kFarthest : std::min(attend.window - 1, kFarthest));
  params.scale = attend.scale * kLog2E;
  params.aligned = IsAligned(attend.keys) && IsAligned(attend.values);
  const Variant variant = Find(attend);
  const int64_t units = CeilDiv(attend.reach, kUnit), workers = splits * variant.warps;
  params.rounds = static_cast<int>(units / workers);
  params.odd_units = static_cast<int>(units % workers);
  const dim3 grid(static_cast<unsigned>(attend.kv_heads), static_cast<unsigned>(splits),
                  static_cast<unsigned>(attend.batch));
  const LaunchConfig launch(grid, 32 * variant.warps, variant.shared_bytes, stream);
  const cudaError_t error = cudaLaunchKernelEx(&launch.config, variant.kernel, params);
  if (error != cudaSuccess || splits == 1) return error;
  const auto combine = attend.type == ElementType::kBf16 ? Combine<__nv_bfloat16> : Combine<__half>;
  return combine(attend, params, device, stream);
}

}  // namespace jaxlowbit
