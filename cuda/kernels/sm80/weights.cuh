// SPDX-License-Identifier: Apache-2.0
//
// Packed weights and scales of an atom, from shared memory to a lane's registers.
#pragma once

#include "cuda/device/rows.cuh"
#include "cuda/kernels/sm80/params.cuh"

namespace jaxlowbit::sm80 {

template <class I>
using Rows = RowPair<typename I::T, typename I::S, I::kBits>;

// `position`: position of the group's 64 scales behind `scales`, and of its zeros behind the scales.
template <class I>
__device__ void LoadRows(const Params& p, uint32_t scales, int position, Rows<I>& rows) {
  const int row = position * static_cast<int>(kAtom) + threadIdx.x / 4 * 2;  // GroupPosition(g)
  const uint32_t zeros = scales + p.bytes.scales;
  rows.LoadScales(scales + row * sizeof(typename I::S));
  if (p.zero_bytes > 1) {
    rows.LoadFloatZeros(zeros + row * sizeof(typename I::S));
  } else if (p.zero_bytes == 1) {
    rows.LoadIntegerZeros(zeros + row);
  }
}

template <class I>
class PackedLoader {
 public:
  __device__ PackedLoader() {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunks_[i] = Keep(PackedChunk<I>(threadIdx.x * kChunks + i) * kCopyBytes);
    }
  }

  __device__ void Load(uint32_t atom,
                       uint32_t (&packed)[kStepsPerAtom][kWordsPerStep<I::kBits>]) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 words = LoadShared16(atom + chunks_[i]);
      const uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[(4 * i + j) / kChunks][(4 * i + j) % kChunks] = four[j];
    }
  }

 private:
  static constexpr int kChunks = kWordsPerStep<I::kBits>;  // of a lane, 4 words each

  int chunks_[kChunks];  // in bytes
};

}  // namespace jaxlowbit::sm80
