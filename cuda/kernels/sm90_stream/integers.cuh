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
      : count_(Opaque((share.atom_end - share.atom_begin) * kStepsPerAtom * 2)),
        target_(Opaque(memory.base + p.plan.gathered + (threadIdx.x % 2) * 8)),
        factors_(Opaque(memory.base + p.plan.whole_rows)),
        source_(Opaque(static_cast<const uint2*>(p.original_lhs) +
                       (int64_t{row} * p.k_blocks + share.atom_begin) * (kAtom / 4))) {}

  // Called by all consumers. Returns whether the row is stored as integers; else it is stored as it is.
  __device__ bool Split() const {
    const auto thread = static_cast<int>(threadIdx.x);
    const uint2* from = Opaque(source_ + thread / 2 * 4 + thread % 2);
    WaitForPreviousKernels(LowWord(from) ^ target_ ^ factors_ ^ static_cast<uint32_t>(count_));
    bool exact = true;
    uint4 next = {};
    if (thread < count_) next = LoadEight(from);
#pragma unroll 1
    for (int i = thread; i - thread % 32 < count_; i += kConsumerThreads) {  // whole warps
      const uint4 now = next;
      from += kConsumerThreads * 2;
      next = {};
      if (i + kConsumerThreads < count_) next = LoadEight(from);
      exact &= SplitEight(i, now);
    }
    if (AllOf(kBarrier, kConsumerThreads, exact)) return true;
    const auto* rows = reinterpret_cast<const uint4*>(source_);
#pragma unroll 1
    for (int i = thread; i < count_; i += kConsumerThreads) {
      StoreShared16(target_ - thread % 2 * 8 + i * kCopyBytes, __ldcg(rows + i));
    }
    SynchronizeConsumers();
    return false;
  }

 private:
  static constexpr int kBarrier = 1;  // of SynchronizeConsumers
  static constexpr int kChunkLanes = kChunkAtoms * kStepsPerAtom * 2;
  static constexpr int kRange = 22;  // between the exponents of a chunk
  static constexpr int kLeast = 40;  // biased exponent e; so that no factor is subnormal

  // Columns 4 h to 4 h + 3 and 8 + 4 h to 8 + 4 h + 3 of a step.
  static __device__ uint4 LoadEight(const uint2* from) {
    const uint2 low = __ldcg(from), high = __ldcg(from + 2);
    return {low.x, low.y, high.x, high.y};
  }

  // Splits columns 4 h to 4 h + 3 and 8 + 4 h to 8 + 4 h + 3 of a step, for i = 2 * step + h.
  __device__ bool SplitEight(int i, const uint4& loaded) const {
    const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    uint32_t largest = 0, least = 0x80008000;  // maximum magnitudes; 0x8000 - minimum ones but 0
#pragma unroll
    for (uint32_t pair : pairs) {
      const uint32_t magnitudes = pair & 0x7fff7fff;
      largest = __vmaxu2(largest, magnitudes);
      least = __vmaxs2(least, 0x80008000 - magnitudes);
    }
    const uint32_t own = max(largest >> 16, largest & 0xffff);
    int exponent = static_cast<int>(own >> 7);
    const int distance = max(static_cast<int>(least) >> 16, static_cast<int>(least << 16) >> 16);
#pragma unroll
    for (int lanes = 1; lanes < kChunkLanes; lanes *= 2) {
      exponent = max(exponent, __shfl_xor_sync(~0u, exponent, lanes));
    }
    const bool exact = own == 0 || (static_cast<unsigned>(exponent - kLeast) < 255 - kLeast &&
                                    (0x8000 - distance) >> 7 >= exponent - kRange);
    exponent = max(exponent, kLeast);
    // 2^(kLargestUp - (exponent - 127)), and its inverse
    const float up = __uint_as_float(static_cast<uint32_t>(254 + kLargestUp - exponent) << 23);
    uint32_t digits[kDigits][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      // The digits are bytes minus 128.
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = pairs[t + 2 * (j % 2)];
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
      const uint32_t to = target_ + i / 2 * (kDigits * kCopyBytes);
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        StoreShared8(to + d * kCopyBytes, digits[d][0], digits[d][1]);
      }
      if (i % kChunkLanes == 0) {
        StoreShared4(factors_ + i / kChunkLanes * 4, static_cast<uint32_t>(exponent - kLargestUp)
                                                         << 23);
      }
    }
    return exact;
  }

  const int count_;  // half steps of the CTA's part of k
  const uint32_t target_, factors_;
  const uint2* const source_;
};

}  // namespace jaxlowbit::sm90_stream
