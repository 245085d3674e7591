// SPDX-License-Identifier: Apache-2.0
//
// qmm_cpu: the quantized matmul on the CPU, as independent tasks for any threads in any order. Tasks depend only on the
// problem, so the result's bits do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/attend_cpu.h"
#include "cpu/rows_cpu.h"
#include "cuda/problem.h"

namespace jaxlowbit {

struct alignas(64) CacheLine {
  float values[16];
};

// Allocates uninitialized memory. Zeroing, as by std::vector, would cost as much as a product with small m.
inline std::unique_ptr<CacheLine[]> AllocateLines(int64_t count) {
  return std::unique_ptr<CacheLine[]>(new CacheLine[count]);
}

// The numbers of a codebook in the clones' layout.
struct CpuCodebook {
  CpuCodebook(const float* numbers, int bits);

  // The codebook of integers without zero points, for up to kMaxIntegerBits bits.
  static constexpr int kMaxIntegerBits = 5;
  static const CpuCodebook& OfIntegers(int bits);

  alignas(64) float numbers[256];     // repeated to fill the array
  alignas(64) uint8_t bytes[4][256];  // the bytes of `numbers`, lowest first
  float largest = 0;                  // maximum magnitude of the finite numbers
  bool finite = true;                 // all numbers are finite
  bool is_bf16 = true;                // all numbers are bf16: the lower bytes are 0
};

// The arguments of a clone: a problem and its buffers.
struct CpuCall {
  QuantizedMatmul problem;
  Buffers buffers;
  const float* permuted = nullptr;        // lhs in the order that the clone reads
  const CpuCodebook* codebook = nullptr;  // null: integers
};

// Whether a clone with bit sums (clone/bit_sums.inc) uses them for this product of one row. Excluded are integer zeros,
// which may cancel weights exactly while sums do not; 3 bits in small groups, where four bits span several groups; and
// 3-bit codebooks, whose numbers are not sums over planes.
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
// Whether one row multiplies 8-bit floats; a clone may permute such a row differently (clone/float8_row.inc).
constexpr bool IsFloat8Row(const QuantizedMatmul& p) { return p.m == 1 && IsFloat8(p); }

// The kernel compiled for one instruction set.
struct CpuClone {
  const char* isa;
  bool has_custom_rows;  // permutes the row differently if HasBitSums or IsFloat8Row
  // Small m: each weight is dequantized in registers and used at once. `permute` prepares rows [begin, end) of lhs.
  void (*permute)(const CpuCall& call, int64_t begin, int64_t end, float* permuted);
  void (*stream)(const CpuCall& call, int64_t batch, int64_t n_block);
  // Large m, rows [m_begin, m_end): weights are dequantized to `scratch` first.
  void (*block)(const CpuCall& call, int64_t batch, int64_t n_block, int64_t m_begin, int64_t m_end,
                float* scratch);
  // bfloat16 rows by AMX, any m; null without AMX. Ranges of rows begin at a multiple of kAmxTokens.
  void (*permute_to_tiles)(const CpuCall& call, int64_t begin, int64_t end, float* permuted);
  void (*tiles)(const CpuCall& call, int64_t batch, int64_t n_begin, int64_t n_end, int64_t m_begin,
                int64_t m_end, float* scratch);
  // Up to kInt8Tokens rows of int8 by integers with VNNI; null without VNNI.
  void (*permute_int8)(const CpuCall& call, int64_t begin, int64_t end, uint32_t* permuted);
  void (*int8)(const CpuCall& call, int64_t batch, int64_t n_block, int64_t m_begin, int64_t m_end,
               const uint32_t* permuted);
  AttendClone attend;
  RowsClone rows;
};

namespace amx {  // AMX, and the AVX-512 extensions of the first CPUs with AMX
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

// The clones in this binary that this machine can run, best first. JAXLOWBIT_CPU_ISA names the best one to consider;
// better ones are left out.
std::vector<const CpuClone*> RunnableCpuClones();

// Maximum M for int8 by VNNI to be as fast as bfloat16 by AMX.
inline constexpr int64_t kMaxInt8RowsWithAmx = 1;

// Returns "" if the clone for `isa` multiplies int8 activations, faster than bfloat16; else the reason.
std::string UnsupportedInt8(const QuantizedMatmul& problem, std::string_view isa);

class CpuMatmul {
 public:
  // `permuted` has PermutedLines lines; products may share it (SharesPermuted).
  CpuMatmul(const QuantizedMatmul& problem, const Buffers& buffers, const CpuClone& clone,
            CacheLine* permuted);

  // Whether a product by the same clone can reuse this product's `permuted`.
  bool SharesPermuted(const QuantizedMatmul& problem, const Buffers& buffers) const;

  // 0 for large m, except with AMX.
  static int64_t PermutedLines(const QuantizedMatmul& problem, const CpuClone& clone);

  // Fills `permuted` from lhs, kPermutedRows rows per task. All permute tasks must end before Run.
  int64_t num_permute_tasks() const;
  void Permute(int64_t task) const;

  int64_t num_tasks() const { return call_.problem.batch * n_tasks_ * m_blocks_; }
  size_t scratch_lines() const;  // per thread that calls Run

  void Run(int64_t task, CacheLine* scratch) const;

 private:
  std::unique_ptr<const CpuCodebook> codebook_;
  CpuCall call_;
  const CpuClone& clone_;
  bool tiles_, stream_;
  int64_t strips_, n_tasks_, m_blocks_;  // strips_: per task
  float* permuted_;
};

}  // namespace jaxlowbit
