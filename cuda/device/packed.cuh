// SPDX-License-Identifier: Apache-2.0
//
// Loads a lane's packed words of 16 channels of an atom from shared memory.
#pragma once

#include "cuda/device/copy.cuh"
#include "cuda/device/format/integer.cuh"
#include "cuda/device/layout.cuh"

namespace jaxlowbit {

// Whether a lane's words are whole 16-byte chunks in one plane. Two chunks per lane are permuted to avoid bank
// conflicts. Other widths have at most one chunk per lane and plane, so they have no conflicts and are not permuted.
template <int kBits>
inline constexpr bool kWholeChunks = kBits % 4 == 0;
// The 16-byte chunks per lane if kWholeChunks.
template <int kBits>
inline constexpr int kLaneChunks = kBits / 4;

// Loads a lane's words of one plane.
template <int kWords>
__device__ inline void LoadPlane(uint32_t shared, uint32_t* words) {
  static_assert(kWords == 0 || kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    const uint4 four = LoadShared16(shared);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else if constexpr (kWords == 2) {
    const uint2 two = LoadShared8(shared);
    words[0] = two.x, words[1] = two.y;
  } else if constexpr (kWords == 1) {
    words[0] = LoadShared4(shared);
  }
}

// Loads the words of all planes. `first`, `second`, `third`: this lane's first word of each.
template <int kBits>
__device__ inline void LoadPlanes(uint32_t first, uint32_t second, uint32_t third,
                                  uint32_t (&packed)[kBits]) {
  using F = Integer<kBits>;
  LoadPlane<F::kFirstWords>(first, packed);
  LoadPlane<F::kSecondWords>(second, packed + F::kFirstWords);
  LoadPlane<F::kThirdWords>(third, packed + F::kFirstWords + F::kSecondWords);
}

// Loads words in the packed order, as bulk copies store them. `first`, `second`, `third`: this lane's first word of
// each plane.
template <int kBits>
__device__ inline void LoadPacked(uint32_t first, uint32_t second, uint32_t third, int lane,
                                  uint32_t (&packed)[kBits]) {
  if constexpr (!kWholeChunks<kBits>) {
    LoadPlanes<kBits>(first, second, third, packed);
  } else if constexpr (kBits == 4) {
    const uint4 words = LoadShared16(first);
    packed[0] = words.x, packed[1] = words.y, packed[2] = words.z, packed[3] = words.w;
  } else {
    // Two chunks per lane. If all lanes read their first chunk first, lanes i and i + 4 would conflict in one bank
    // group.
    const bool second_first = lane / 4 % 2 != 0;
    const uint4 a = LoadShared16(first + (second_first ? kCopyBytes : 0));
    const uint4 b = LoadShared16(first + (second_first ? 0 : kCopyBytes));
    const uint4 words[2] = {second_first ? b : a, second_first ? a : b};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      packed[4 * i] = words[i].x, packed[4 * i + 1] = words[i].y;
      packed[4 * i + 2] = words[i].z, packed[4 * i + 3] = words[i].w;
    }
  }
}

// Loads words that TMA stored as rows of 128 bytes: whole chunks with chunk c of 16 bytes at c ^ (row % 8), others
// unpermuted. `first`, `second`, `third`: as above; a lane's second chunk is adjacent to its first.
template <int kBits>
__device__ inline void LoadTmaPacked(uint32_t first, uint32_t second, uint32_t third,
                                     uint32_t (&packed)[kBits]) {
  if constexpr (!kWholeChunks<kBits>) {
    LoadPlanes<kBits>(first, second, third, packed);
  } else {
#pragma unroll
    for (int chunk = 0; chunk < kLaneChunks<kBits>; ++chunk) {
      const uint4 four = LoadShared16(first ^ (chunk * kCopyBytes));
      packed[4 * chunk] = four.x, packed[4 * chunk + 1] = four.y;
      packed[4 * chunk + 2] = four.z, packed[4 * chunk + 3] = four.w;
    }
  }
}

// The offset, in an atom that TMA stored, of the first word of lane `lane` of the atom's 128.
template <int kBits>
__device__ inline int FirstTmaWord(int lane) {
  if constexpr (!kWholeChunks<kBits>) return FirstPlane<kBits>(lane);
  const int chunk = lane * kLaneChunks<kBits>, row = chunk / 8;
  return row * 128 + (chunk % 8 ^ row % 8) * kCopyBytes;
}

}  // namespace jaxlowbit
