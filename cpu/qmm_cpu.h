// SPDX-License-Identifier: Apache-2.0
//
// qmm_cpu: the quantized matmul on the CPU, as independent tasks that any threads may run in any
// order. How the work is cut depends on the problem alone, so the result's bits do not depend on
// the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/attend_cpu.h"
#include "cpu/rows_cpu.h"
#include "cuda/problem.h"

namespace jaxlowbit {

struct alignas(64) CacheLine {
  float values[16];
};

// Memory that is written before it is read. Zeros of a std::vector would cost as much as a product of few rows.
inline std::unique_ptr<CacheLine[]> AllocateLines(int64_t count) {
  return std::unique_ptr<CacheLine[]>(new CacheLine[count]);
}

// The numbers of a codebook, as the clones read them.
struct CpuCodebook {
  CpuCodebook(const float* numbers, int bits);

  // Of integers of so many bits, up to kMostIntegerBits, that have no zero of their own.
  static constexpr int kMostIntegerBits = 5;
  static const CpuCodebook& OfIntegers(int bits);

  alignas(64) float numbers[256];     // the first ones again and again
  alignas(64) uint8_t bytes[4][256];  // of these, the lowest of each number first
  float largest = 0;                  // magnitude of those that are finite
  bool finite = true;                 // all of them
  bool is_bf16 = true;                // all of them: the lower bytes are 0
};

// A problem with its buffers, as the clones see it.
struct CpuCall {
  QuantizedMatmul problem;
  Buffers buffers;
  const float* permuted = nullptr;        // lhs in the order that the clone reads
  const CpuCodebook* codebook = nullptr;  // null: integers
};

// Whether one row is multiplied by sums of activations that bits of weights look up, where a clone does that
// (clone/bit_sums.inc). Zeros that are integers may cancel weights exactly, which sums do not. Of 3 bits, four belong
// to rows of several groups where groups are small, and numbers of a codebook are no sums of what planes mean.
constexpr bool HasBitSums(const QuantizedMatmul& p) {
  if (p.m != 1 || p.zero == ZeroKind::kInteger) return false;
  if (p.bits == 3) {
    return p.codebook == Codebook::kNone && (p.group_size < 0 || p.group_size % kAtom == 0);
  }
  return p.bits < 3;
}
constexpr int64_t BitSumLines(int bits) { return 16 * bits + 1; }  // of an atom

constexpr bool IsFloat8(const QuantizedMatmul& p) {
  return p.codebook == Codebook::kE4m3 || p.codebook == Codebook::kE5m2;
}
// Whether one row meets floats of 8 bits, for which a clone may want it in another order (clone/float8_row.inc).
constexpr bool IsFloat8Row(const QuantizedMatmul& p) { return p.m == 1 && IsFloat8(p); }

// The kernel compiled for one instruction set.
struct CpuClone {
  const char* isa;
  bool has_own_rows;  // one row of what HasBitSums and IsFloat8Row say is permuted otherwise
  // Few rows: each weight is dequantized in registers and used at once. `permute` prepares rows [begin, end) of lhs.
  void (*permute)(const CpuCall& call, int64_t begin, int64_t end, float* permuted);
  void (*stream)(const CpuCall& call, int64_t batch, int64_t n_block);
  // Many rows [m_begin, m_end): weights are dequantized to `scratch` and used from there.
  void (*block)(const CpuCall& call, int64_t batch, int64_t n_block, int64_t m_begin, int64_t m_end,
                float* scratch);
  // Any rows of bfloat16, by AMX; null where there is none. `permute_to_tiles` and `tiles` take rows from a multiple of
  // kAmxTokens on.
  void (*permute_to_tiles)(const CpuCall& call, int64_t begin, int64_t end, float* permuted);
  void (*tiles)(const CpuCall& call, int64_t batch, int64_t n_begin, int64_t n_end, int64_t m_begin,
                int64_t m_end, float* scratch);
  // Up to kInt8Tokens rows of int8 by integers, with VNNI; null where there is none.
  void (*permute_int8)(const CpuCall& call, int64_t begin, int64_t end, uint32_t* permuted);
  void (*int8)(const CpuCall& call, int64_t batch, int64_t n_block, int64_t m_begin, int64_t m_end,
               const uint32_t* permuted);
  AttendClone attend;
  RowsClone rows;
};

namespace amx {  // AMX, and the extensions of AVX-512 that came with it or before
extern const CpuClone kClone;
}
namespace vnni {  // AVX-512 with VNNI and VBMI
extern const CpuClone kClone;
}
namespace avx512 {
extern const CpuClone kClone;
}
namespace avx2 {
extern const CpuClone kClone;
}
namespace baseline {
extern const CpuClone kClone;
}

// The clones this binary holds that this machine can run, best first. JAXLOWBIT_CPU_ISA names the one that is to be the
// first; others can then not run.
std::vector<const CpuClone*> RunnableCpuClones();

class CpuMatmul {
 public:
  // `permuted` has PermutedLines, which products may share (SharesPermuted).
  CpuMatmul(const QuantizedMatmul& problem, const Buffers& buffers, const CpuClone& clone,
            CacheLine* permuted);

  // Whether a product of the same clone reads what this one has permuted.
  bool SharesPermuted(const QuantizedMatmul& problem, const Buffers& buffers) const;

  // None for many rows, but by AMX.
  static int64_t PermutedLines(const QuantizedMatmul& problem, const CpuClone& clone);

  // Fills `permuted` from rows of lhs, those of a task of kPermutedRows, before anything runs.
  int64_t num_permute_tasks() const;
  void Permute(int64_t task) const;

  int64_t num_tasks() const { return call_.problem.batch * n_tasks_ * m_blocks_; }
  size_t scratch_lines() const;  // for each thread that calls Run

  void Run(int64_t task, CacheLine* scratch) const;

 private:
  std::unique_ptr<const CpuCodebook> codebook_;
  CpuCall call_;
  const CpuClone& clone_;
  bool tiles_, stream_;
  int64_t strips_, n_tasks_, m_blocks_;  // strips: of a task
  float* permuted_;
};

}  // namespace jaxlowbit
