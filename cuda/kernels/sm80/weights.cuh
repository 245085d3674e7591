// SPDX-License-Identifier: Apache-2.0
//
// Packed weights and scales of an atom, from shared memory to a lane's registers.
#pragma once

#include "cuda/device/packed.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/kernels/sm80/params.cuh"

namespace jaxlowbit::sm80 {

template <typename T, typename S, int kBits, Codebook kCodebook>
struct RowsOf {
  using type = typename CodebookRows<T, S, kBits, kCodebook, 0>::type;
};

template <typename T, typename S, int kBits>
struct RowsOf<T, S, kBits, Codebook::kNone> {
  using type = RowPair<T, S, kBits>;
};

template <class I>
using Rows = typename RowsOf<typename I::T, typename I::S, I::kBits, I::kCodebook>::type;

// `position`: index of the group in `scales`, in units of 64 scales, and in the zeros that follow them.
template <class I>
__device__ void LoadRows(const Params& p, uint32_t scales, int position, Rows<I>& rows) {
  const int row = position * static_cast<int>(kAtom) + threadIdx.x / 4 * 2;  // GroupPosition(g)
  const uint32_t zeros = scales + p.bytes.scales;
  rows.LoadScales(scales + row * sizeof(typename I::S));
  if constexpr (I::kCodebook == Codebook::kNone) {
    if (p.zero_bytes > 1) {
      rows.LoadFloatZeros(zeros + row * sizeof(typename I::S));
    } else if (p.zero_bytes == 1) {
      rows.LoadIntegerZeros(zeros + row);
    }
  }
}

// Loads this lane's packed words of an atom.
template <class I>
class PackedLoader {
 public:
  __device__ PackedLoader() {
    if constexpr (kWholeChunks<I::kBits>) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        at_[i] = Opaque(PackedChunk<I>(threadIdx.x * kLoads + i) * kCopyBytes);
      }
    } else {
      at_[0] = Opaque(FirstPlane<I::kBits>(threadIdx.x));
      if constexpr (kLoads > 1) at_[1] = Opaque(SecondPlane<I::kBits>(threadIdx.x));
      if constexpr (kLoads > 2) at_[2] = Opaque(ThirdPlane<I::kBits>(threadIdx.x));
    }
  }

  __device__ void Load(uint32_t atom, uint32_t (&packed)[I::kBits]) const {
    if constexpr (kWholeChunks<I::kBits>) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 words = LoadShared16(atom + at_[i]);
        packed[4 * i] = words.x, packed[4 * i + 1] = words.y;
        packed[4 * i + 2] = words.z, packed[4 * i + 3] = words.w;
      }
    } else {
      LoadPlanes<I::kBits>(atom + at_[0], atom + at_[kLoads > 1 ? 1 : 0], atom + at_[kLoads - 1],
                           packed);
    }
  }

 private:
  // Chunks of 16 bytes, or planes.
  static constexpr int kLoads =
      kWholeChunks<I::kBits> ? kLaneChunks<I::kBits> : kNumPlanes<I::kBits>;

  int at_[kLoads];  // in bytes
};

}  // namespace jaxlowbit::sm80
