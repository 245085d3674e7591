// SPDX-License-Identifier: Apache-2.0
//
// LhsPath::kIntegers: before the first tile, the consumers turn the bfloat16 row of the CTA's part of k into integers, so
// that mma multiplies it by unscaled weights exactly. In a chunk of two atoms, with e the largest exponent,
//
//   x = v 2^(e - 29),  v = d0 + d1 2^8 + d2 2^16 + d3 2^24,  d0 to d3: signed bytes
//
// The four digits of a row are four columns of the mma m16n8k32, whose other columns repeat them. Dequantizing a word of
// 8 weights takes three instructions instead of nine, and one mma multiplies two steps of k instead of one.
//
// v is exact if all exponents of a chunk are within 22 of e. If a row has other elements (or infinities, NaN, or too
// small numbers), the CTA multiplies bfloat16 activations as other instances do.
//
// Shared memory: digits [atom][step][digit][16 columns], then 2^(e - 29) of each chunk; or activations [atom][columns].
// The 16 columns of a step are in the order of a word's bytes: 4 t + 2 e + v for column 8 v + 2 t + e (device/layout.cuh).
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::sm90_stream {

inline constexpr int kChunkAtoms = 2;
inline constexpr int kLargestUp = 29;  // v is below 2^30
inline constexpr int kDigits = 4;
inline constexpr int kDigitBytes = kDigits * static_cast<int>(kAtom);  // of an atom
inline constexpr int kFactorBytes = 4;                                 // of a chunk

// Four weights of a word of 8: 16 (q - 8), as signed bytes, in the order of digits. Rows g + 8; of `word << 4`, rows g.
// (word & mask) ^ signs, in one instruction: for a C++ expression of two constants the compiler generates two.
__device__ inline uint32_t WeightBytes(uint32_t word) {
  uint32_t bytes;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;\n"
      : "=r"(bytes)
      : "r"(word), "r"(0xf0f0f0f0), "r"(0x80808080));
  return bytes;
}
inline constexpr int kWeightUp = 4;  // log2 of the factor of these weights

class RowSplitter {
 public:
  // Computes addresses: after the wait, each instruction delays the first mma.
  __device__ RowSplitter(const Params& p, const Share& share, Memory memory, int row)
      : count_(Opaque((share.atom_end - share.atom_begin) * kStepsPerAtom)),
        target_(Opaque(memory.base + p.plan.gathered)),
        factors_(Opaque(memory.base + p.plan.whole_rows)),
        source_(Opaque(static_cast<const uint4*>(p.original_lhs) +
                       (int64_t{row} * p.k_blocks + share.atom_begin) * (kAtom / 8))) {}

  // Called by all consumers. Returns whether the row is stored as integers; else it is stored as it is.
  __device__ bool Split() const {
    const auto thread = static_cast<int>(threadIdx.x);
    WaitForPreviousKernels(LowWord(source_) ^ target_ ^ factors_ ^ static_cast<uint32_t>(count_));
    bool exact = true;
#pragma unroll 1
    for (int i = thread; i - thread % 32 < count_; i += kConsumerThreads) {  // whole warps
      exact &= SplitStep(i);
    }
    if (AllOf(kBarrier, kConsumerThreads, exact)) return true;
#pragma unroll 1
    for (int i = thread; i < 2 * count_; i += kConsumerThreads) {
      StoreShared16(target_ + i * kCopyBytes, __ldcg(source_ + i));
    }
    SynchronizeConsumers();
    return false;
  }

 private:
  static constexpr int kBarrier = 1;  // of SynchronizeConsumers
  static constexpr int kChunkLanes = kChunkAtoms * kStepsPerAtom;
  static constexpr int kRange = 22;  // between the exponents of a chunk
  static constexpr int kLeast = 40;  // biased exponent e; so that no factor is subnormal

  // Splits the 16 columns of step `i`.
  __device__ bool SplitStep(int i) const {
    uint32_t pairs[8] = {};  // columns 2 j and 2 j + 1
    if (i < count_) {
      const uint4 low = __ldcg(source_ + 2 * i), high = __ldcg(source_ + 2 * i + 1);
      pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
      pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
    }
    uint32_t largest = 0, least = ~0u;  // magnitudes; minus 1, so that zeros do not count
#pragma unroll
    for (uint32_t pair : pairs) {
      const uint32_t magnitudes = pair & 0x7fff7fff;
      largest = __vmaxu2(largest, magnitudes);
      least = __vminu2(least, __vsub2(magnitudes, 0x00010001));
    }
    int exponent = static_cast<int>(max(largest >> 16, largest & 0xffff) >> 7);
    const int smallest = static_cast<int>((min(least >> 16, least & 0xffff) + 1) >> 7);
#pragma unroll
    for (int lanes = 1; lanes < kChunkLanes; lanes *= 2) {
      exponent = max(exponent, __shfl_xor_sync(~0u, exponent, lanes));
    }
    const bool zeros = largest == 0;
    const bool exact =
        zeros || (exponent < 255 && exponent >= kLeast && smallest >= exponent - kRange);
    // 2^(kLargestUp - (exponent - 127)), and its inverse
    const float up =
        __uint_as_float(static_cast<uint32_t>(254 + kLargestUp - max(exponent, kLeast)) << 23);
    uint32_t digits[kDigits][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      // Columns 2 t, 8 + 2 t, 2 t + 1, 8 + 2 t + 1. The digits are bytes minus 128.
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = pairs[t + 4 * (j % 2)];
        const float x = __uint_as_float(j < 2 ? pair << 16 : pair & 0xffff0000);
        v[j] = static_cast<uint32_t>(__float2int_rn(x * up)) + 0x80808080;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // digits 2 half and 2 half + 1
        const uint32_t selector = half == 0 ? 0x5140 : 0x7362;
        const uint32_t first = __byte_perm(v[0], v[1], selector);  // a0 b0 a1 b1
        const uint32_t second = __byte_perm(v[2], v[3], selector);
        digits[2 * half][t] = __byte_perm(first, second, 0x5410) ^ 0x80808080;
        digits[2 * half + 1][t] = __byte_perm(first, second, 0x7632) ^ 0x80808080;
      }
    }
    if (i < count_) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        StoreShared16(target_ + (i * kDigits + d) * kCopyBytes,
                      make_uint4(digits[d][0], digits[d][1], digits[d][2], digits[d][3]));
      }
      if (i % kChunkLanes == 0) {
        const int inverse = max(exponent, kLeast) - kLargestUp;
        StoreShared4(factors_ + i / kChunkLanes * 4, static_cast<uint32_t>(inverse) << 23);
      }
    }
    return exact;
  }

  const int count_;  // steps of the CTA's part of k
  const uint32_t target_, factors_;
  const uint4* const source_;
};

}  // namespace jaxlowbit::sm90_stream
