// SPDX-License-Identifier: Apache-2.0
//
// Codes of an atom and what dequantizes them, from shared memory to a lane's registers.
#pragma once

#include "cuda/device/dequant.cuh"
#include "cuda/qmm_sm80/params.cuh"

namespace jaxlowbit::qmm_sm80 {

template <class I>
class CodeLoader {
 public:
  __device__ CodeLoader() {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunks_[i] = Keep(CodeChunk<I>(threadIdx.x * kChunks + i) * kCopyBytes);
    }
  }

  __device__ void Load(uint32_t atom,
                       uint32_t (&codes)[kStepsPerAtom][kWordsPerStep<I::kBits>]) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 words = LoadShared16(atom + chunks_[i]);
      const uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[(4 * i + j) / kChunks][(4 * i + j) % kChunks] = four[j];
    }
  }

 private:
  static constexpr int kChunks = kWordsPerStep<I::kBits>;  // of a lane, 4 words each

  int chunks_[kChunks];  // in bytes
};

// What the two rows g and g + 8 that a lane holds of an atom have in common in one group.
template <class I>
class RowPair {
 public:
  using T = typename I::T;
  using S = typename I::S;

  // Zeros as they are until, or unless, a group brings its own.
  __device__ void Start(const Params& p) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Float zeros are added to the codes as they are.
      centre_[h] = Centre<T, I::kBits>::Of(p.zero_bytes > 1 ? 0 : 1 << (I::kBits - 1));
      offset_[h] = RowScale<T, S>::NegativeZero();
    }
  }

  // `position`: of the group's 64 scales behind `scales`, and of its zeros behind those.
  __device__ void Load(const Params& p, uint32_t scales, int position) {
    const int row = position * static_cast<int>(kAtom) + threadIdx.x / 4 * 2;  // GroupPosition(g)
    RowScale<T, S>::LoadPair(scales + row * sizeof(S), scale_);
    if (p.zero == nullptr) return;
    const uint32_t zero = scales + p.bytes.scales + row * p.zero_bytes;
    if (p.zero_bytes > 1) {
      RowScale<T, S>::LoadPair(zero, offset_);
      return;
    }
    const uint32_t zeros = LoadShared2(zero);
    centre_[0] = Centre<T, I::kBits>::Of(zeros & 255);
    centre_[1] = Centre<T, I::kBits>::Of(zeros >> 8);
  }

  // Of row g + 8 * h.
  __device__ S scale(int h) const { return scale_[h].value; }

  // The weights of one step, in the order of operand A; without their scales if those multiply sums.
  __device__ void Dequantize(const uint32_t (&codes)[kWordsPerStep<I::kBits>],
                             uint32_t (&weights)[4]) const {
    Unpack<T, I::kBits>(codes, centre_, weights);
    if constexpr (!I::kScaleSums) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[j] = scale_[j % 2].MultiplyAdd(weights[j], offset_[j % 2]);
      }
    }
  }

 private:
  RowScale<T, S> scale_[2], offset_[2];
  Centre<T, I::kBits> centre_[2];
};

}  // namespace jaxlowbit::qmm_sm80
