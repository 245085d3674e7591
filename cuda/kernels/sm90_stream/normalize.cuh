// SPDX-License-Identifier: Apache-2.0
//
// LhsPath::kNormalizes: before the first tile, the consumers of every CTA read whole rows of x and of their addend, add
// them, and normalize the columns of the CTA's part of k. The bits are those of ops/rms_norm.cu. The first cluster also
// stores the sums. Normalized activations have the layout of a stage, without padding rows.
//
// A vector is 8 columns. Warp u of a row in rms_norm has the vectors 32 u to 32 u + 31, and those 1024 later; here a
// warp takes the part of several of them (device/row_squares.cuh).
#pragma once

#include "cuda/device/pair.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/device/row_squares.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::sm90_stream {

// 8 consecutive values of T, or of float32 if `wide`.
template <typename T>
struct NormVector {
  uint4 words[2];  // narrow: only the first

  __device__ void Load(const void* from, bool wide, int64_t vector) {
    const uint4* source = static_cast<const uint4*>(from);
    words[0] = source[wide ? 2 * vector : vector];
    if (wide) words[1] = source[2 * vector + 1];
  }
  // Values 2 i and 2 i + 1.
  __device__ float2 At(bool wide, int i) const {
    const uint32_t narrow[] = {words[0].x, words[0].y, words[0].z, words[0].w};
    const uint4& half = words[i / 2];
    const uint32_t low = i % 2 == 0 ? half.x : half.z, high = i % 2 == 0 ? half.y : half.w;
    return wide ? make_float2(__uint_as_float(low), __uint_as_float(high))
                : make_float2(Pair<T>::Low(narrow[i]), Pair<T>::High(narrow[i]));
  }
};

template <typename T>
class RowNormalizer {
 public:
  // Loads factors of columns: no kernel of the call writes them.
  __device__ RowNormalizer(const Params& p, const Share& share, Memory memory)
      : p_(p),
        memory_(memory),
        vectors_(p.k_blocks * kVectors),
        first_(share.atom_begin * kVectors),
        count_((share.atom_end - share.atom_begin) * kVectors) {
    LoadScales(0, scales_);
  }

  // Called by all consumers; afterwards each may read all of the CTA's values.
  __device__ void Normalize() {
    WaitForPreviousKernels();  // they may have written x and the addend
    const int warps = SquaresWarps(vectors_), parts = p_.m * warps;
#pragma unroll 1
    for (int part = threadIdx.x / 32; part < parts; part += kUnroll * kWarps) Add(part, warps);
    NormVector<T> next[kScales];
    LoadScales(kScales, next);
    SynchronizeConsumers();
    float factors[kMaxNormalizedRows] = {};
#pragma unroll
    for (int row = 0; row < kMaxNormalizedRows; ++row) {
      if (row < p_.m) factors[row] = FactorOf(row, warps);
    }
    Scale(0, scales_, factors);
#pragma unroll 1
    for (int vector = kScales; vector * kConsumerThreads < count_; vector += kScales) {
      Scale(vector, next, factors);
      LoadScales(vector + kScales, next);
    }
    SynchronizeConsumers();
  }

 private:
  static constexpr int kVectors = kRowBytes / kCopyBytes;  // of a row and an atom
  static_assert(kVectors * kSquaresElements == kAtom);
  static constexpr int kUnroll = 4;  // warps of rms_norm that a warp replaces at a time
  static constexpr int kScales = 2;  // vectors of scales that a thread loads at a time

  // Vector `number` of a thread, in the CTA's part of k.
  __device__ static int VectorAt(int number) {
    return static_cast<int>(threadIdx.x) + number * kConsumerThreads;
  }

  // Loads the scales of a thread's vectors from `number` on.
  __device__ void LoadScales(int number, NormVector<T> (&scales)[kScales]) const {
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int at = VectorAt(number + i);
      if (at < count_) scales[i].Load(p_.norm.scale, p_.norm.wide_scale, first_ + at);
    }
  }

  // Adds the rows in the columns of warps `part`, `part` + kWarps, ... of all rows, keeps the sums of the CTA's part of
  // k, and stores the sums of their squares.
  __device__ void Add(int part, int warps) const {
    const int lane = threadIdx.x % 32, parts = p_.m * warps;
    float squares[kUnroll] = {};
#pragma unroll 1
    for (int pass = 0; pass < vectors_; pass += kMaxSquaresThreads) {
      uint4 x[kUnroll], addends[kUnroll];
      int rows[kUnroll], vectors[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int own = part + i * kWarps;
        rows[i] = own >= warps;
        vectors[i] = pass + (own - rows[i] * warps) * 32 + lane;
        if (own >= parts) vectors[i] = vectors_;
        if (vectors[i] >= vectors_) continue;
        const int64_t at = int64_t{rows[i]} * vectors_ + vectors[i];
        x[i] = static_cast<const uint4*>(p_.original_lhs)[at];
        addends[i] = static_cast<const uint4*>(p_.norm.addend)[at];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (vectors[i] < vectors_) AddVector(rows[i], vectors[i], x[i], addends[i], squares[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) squares[i] = SumOfLanes(squares[i]);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int own = part + i * kWarps, row = own >= warps;
      if (lane == 0 && own < parts) {
        StoreShared4(Squares(row, own - row * warps), __float_as_uint(squares[i]));
      }
    }
  }

  __device__ void AddVector(int row, int vector, const uint4& x, const uint4& addend,
                            float& squares) const {
    const uint32_t values[] = {x.x, x.y, x.z, x.w};
    const uint32_t others[] = {addend.x, addend.y, addend.z, addend.w};
    uint32_t sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = Pair<T>::Round(Pair<T>::Low(values[i]) + Pair<T>::Low(others[i]),
                               Pair<T>::High(values[i]) + Pair<T>::High(others[i]));
      squares = fmaf(Pair<T>::Low(sums[i]), Pair<T>::Low(sums[i]), squares);
      squares = fmaf(Pair<T>::High(sums[i]), Pair<T>::High(sums[i]), squares);
    }
    const int own = vector - first_;
    if (own < 0 || own >= count_) return;
    const uint4 sum = make_uint4(sums[0], sums[1], sums[2], sums[3]);
    StoreShared16(Place(own, row), sum);
    if (static_cast<int>(blockIdx.x) >> p_.plan.cluster_shift == 0) {
      static_cast<uint4*>(p_.norm.sum)[int64_t{row} * vectors_ + vector] = sum;
    }
  }

  // The factor of a row.
  __device__ float FactorOf(int row, int warps) const {
    const int lane = threadIdx.x % 32;
    const float squares = lane < warps ? __uint_as_float(LoadShared4(Squares(row, lane))) : 0;
    const auto columns = static_cast<float>(vectors_ * kSquaresElements);
    return rsqrtf(__fdiv_rn(SumOfLanes(squares), columns) + p_.norm.epsilon);
  }

  // Replaces the sums of a thread's vectors from `number` on by normalized values.
  __device__ void Scale(int number, const NormVector<T> (&scales)[kScales],
                        const float (&factors)[kMaxNormalizedRows]) const {
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      if (VectorAt(number + i) < count_) ScaleVector(VectorAt(number + i), scales[i], factors);
    }
  }
  __device__ void ScaleVector(int at, const NormVector<T>& scale,
                              const float (&factors)[kMaxNormalizedRows]) const {
#pragma unroll
    for (int row = 0; row < kMaxNormalizedRows; ++row) {
      if (row >= p_.m) break;
      const uint4 sum = LoadShared16(Place(at, row));
      uint32_t words[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 scales = scale.At(p_.norm.wide_scale, i);
        words[i] = Pair<T>::Round(Pair<T>::Low(words[i]) * factors[row] * scales.x,
                                  Pair<T>::High(words[i]) * factors[row] * scales.y);
      }
      StoreShared16(Place(at, row), make_uint4(words[0], words[1], words[2], words[3]));
    }
  }

  // The address of vector `at` of the CTA's part of a row.
  __device__ uint32_t Place(int at, int row) const {
    const int atom = at / kVectors, column = at % kVectors;
    return memory_.base + p_.plan.gathered + (atom * p_.m + row) * kRowBytes +
           (column ^ row % 8) * kCopyBytes;
  }
  // The sum of squares of a warp of rms_norm.
  __device__ uint32_t Squares(int row, int warp) const {
    return memory_.base + p_.plan.whole_rows + (row * 32 + warp) * 4;
  }

  const Params& p_;
  const Memory memory_;
  const int vectors_;        // of a row
  const int first_, count_;  // of the CTA's part of a row
  NormVector<T> scales_[kScales];
};

}  // namespace jaxlowbit::sm90_stream
