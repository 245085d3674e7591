// SPDX-License-Identifier: Apache-2.0
#include "cpu/qmm_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "cpu/convert.h"
#include "cpu/tuning.h"

namespace jaxlowbit {
namespace {

#if defined(__x86_64__) && defined(__linux__)
// Whether the CPU has bfloat16 tiles and the extensions of the amx clone, and the system lets this process use them,
// which it has to request once. https://docs.kernel.org/arch/x86/xstate.html
bool HasTiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool found = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr unsigned kAvx512Vbmi = 1u << 1;
  if (!found || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0 || (c & kAvx512Vbmi) == 0) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & kAvx512Bf16) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The smallest m that AMX multiplies faster than vector registers. It depends on the conversion of weights to bfloat16
// (clone/amx.inc).
int64_t MinTileTokens(const QuantizedMatmul& problem) {
  const int64_t group_size = problem.group_size;
  const bool looked_up = problem.bits <= 4 && (group_size < 0 || group_size >= kAtom / 2);
  if (!looked_up) return 4;
  return group_size < 0 || group_size % kAtom == 0 ? 2 : 1;
}

bool UsesTiles(const QuantizedMatmul& problem, const CpuClone& clone) {
  return clone.tiles != nullptr && problem.lhs == ElementType::kBf16 &&
         problem.m >= MinTileTokens(problem);
}

int64_t TaskStrips(const QuantizedMatmul& problem) {
  if (problem.m * problem.k * SizeOf(problem.lhs) <= kAmxLhsBytes) return 1;
  return std::clamp<int64_t>(problem.n_blocks() / kAmxTasks, 1, kAmxStrips);
}

}  // namespace

std::vector<const CpuClone*> RunnableCpuClones() {
  std::vector<const CpuClone*> clones;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
#if defined(__linux__)
    static const bool has_tiles = HasTiles();
    if (has_tiles) clones.push_back(&amx::kClone);
#endif
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi")) {
      clones.push_back(&vnni::kClone);
    }
    clones.push_back(&avx512::kClone);
  }
  if (has_avx2) clones.push_back(&avx2::kClone);
#endif
  clones.push_back(&baseline::kClone);
  if (const char* isa = std::getenv("JAXLOWBIT_CPU_ISA"); isa != nullptr) {
    const auto is_named = [&](const CpuClone* clone) {
      return std::string_view(isa) == clone->isa;
    };
    const auto named = std::find_if(clones.begin(), clones.end(), is_named);
    if (named != clones.end()) clones.erase(clones.begin(), named);
  }
  return clones;
}

std::string UnsupportedInt8(const QuantizedMatmul& problem, std::string_view isa) {
  if (isa != "amx" && isa != "vnni") return "this CPU has no AVX-512 VNNI";
  if (problem.lhs != ElementType::kInt8) {
    return std::string("its kernels take quantized activations of int8, these are ") +
           kElementTypeNames[static_cast<int>(problem.lhs)];
  }
  if (problem.codebook != Codebook::kNone || Is8Bit(problem.scale)) {
    return "with int8 its kernels read integers with scales of 16 or 32 bits";
  }
  if (isa == "amx" && problem.m > kMaxInt8RowsWithAmx) {
    return "AMX multiplies more rows faster in bfloat16";
  }
  return "";
}

CpuCodebook::CpuCodebook(const float* from, int bits) {
  for (size_t i = 0; i < std::size(numbers); ++i) {
    const float number = numbers[i] = from[i % (1 << bits)];
    for (int byte = 0; byte < 4; ++byte) bytes[byte][i] = FloatToBits(number) >> 8 * byte;
    is_bf16 = is_bf16 && FloatToBits(number) << 16 == 0;
    if (std::isfinite(number)) {
      largest = std::max(largest, std::abs(number));
    } else {
      finite = false;
    }
  }
}

const CpuCodebook& CpuCodebook::OfIntegers(int bits) {
  static const auto codebooks = [] {
    std::vector<CpuCodebook> all;
    for (int width = 1; width <= kMaxIntegerBits; ++width) {
      float numbers[1 << kMaxIntegerBits];
      for (int code = 0; code < 1 << width; ++code) numbers[code] = code - (1 << (width - 1));
      all.emplace_back(numbers, width);
    }
    return all;
  }();
  return codebooks[bits - 1];
}

CpuMatmul::CpuMatmul(const QuantizedMatmul& problem, const Buffers& buffers, const CpuClone& clone,
                     CacheLine* permuted)
    : codebook_(buffers.codebook == nullptr ? nullptr
                                            : new CpuCodebook(buffers.codebook, problem.bits)),
      call_{problem, buffers, nullptr, codebook_.get()},
      clone_(clone),
      tiles_(UsesTiles(problem, clone)),
      stream_(!tiles_ && problem.m <= kStreamTokens),
      strips_(tiles_ ? TaskStrips(problem) : 1),
      n_tasks_(CeilDiv(problem.n_blocks(), strips_)),
      m_blocks_(stream_ ? std::min<int64_t>(problem.m, 1)
                        : CeilDiv(problem.m, tiles_ ? kAmxBlockTokens : kBlockTokens)),
      permuted_(PermutedLines(problem, clone) == 0 ? nullptr : permuted->values) {
  call_.permuted = permuted_;
}

bool CpuMatmul::SharesPermuted(const QuantizedMatmul& problem, const Buffers& buffers) const {
  const QuantizedMatmul& own = call_.problem;
  const auto has = [&](bool (*row)(const QuantizedMatmul&), const QuantizedMatmul& of) {
    return clone_.has_custom_rows && row(of);
  };
  const bool sums = has(HasBitSums, own);
  return buffers.lhs == call_.buffers.lhs && problem.m == own.m && problem.k == own.k &&
         problem.batch == own.batch && UsesTiles(problem, clone_) == tiles_ &&
         has(HasBitSums, problem) == sums && has(IsFloat8Row, problem) == has(IsFloat8Row, own) &&
         (!sums || (problem.bits == own.bits && problem.zero == own.zero &&
                    buffers.codebook == call_.buffers.codebook));
}

int64_t CpuMatmul::PermutedLines(const QuantizedMatmul& problem, const CpuClone& clone) {
  constexpr int64_t kLine = sizeof(CacheLine) / sizeof(float);
  const int64_t rows = problem.batch * problem.k_blocks() * kAtom / kLine;  // of one token
  if (UsesTiles(problem, clone)) {
    return rows / 2 * CeilDiv(problem.m, kAmxTokens) * TileWidth(problem.m);
  }
  if (clone.has_custom_rows && HasBitSums(problem)) {
    return problem.batch * problem.k_blocks() * BitSumLines(problem.bits);
  }
  return problem.m <= kStreamTokens ? rows * problem.m : 0;
}

int64_t CpuMatmul::num_permute_tasks() const {
  return permuted_ == nullptr ? 0 : CeilDiv(call_.problem.m, kPermutedRows);
}

void CpuMatmul::Permute(int64_t task) const {
  const auto permute = tiles_ ? clone_.permute_to_tiles : clone_.permute;
  permute(call_, task * kPermutedRows, std::min(call_.problem.m, (task + 1) * kPermutedRows),
          permuted_);
}

size_t CpuMatmul::scratch_lines() const {
  if (stream_) return 0;
  if (!tiles_) return kScratchBytes / sizeof(CacheLine);
  constexpr int64_t kPair = 2 * kAmxTokens;
  const int64_t tokens = CeilDiv(std::min(call_.problem.m, kAmxBlockTokens), kPair) * kPair;
  return 4 * (kTileWeightWords + strips_ * tokens * kAtom) / sizeof(CacheLine);
}

void CpuMatmul::Run(int64_t task, CacheLine* scratch) const {
  const int64_t n_task = task / m_blocks_ % n_tasks_;
  const int64_t batch = task / m_blocks_ / n_tasks_;
  if (stream_) return clone_.stream(call_, batch, n_task);
  // Block sizes differ by up to one unit: a token or a tile of tokens.
  const int64_t m = call_.problem.m, m_block = task % m_blocks_;
  const int64_t unit = tiles_ ? kAmxTokens : 1, units = CeilDiv(m, unit);
  const int64_t begin = units * m_block / m_blocks_ * unit;
  const int64_t end = std::min(m, units * (m_block + 1) / m_blocks_ * unit);
  if (tiles_) {
    const int64_t n_blocks = call_.problem.n_blocks();
    clone_.tiles(call_, batch, n_blocks * n_task / n_tasks_, n_blocks * (n_task + 1) / n_tasks_,
                 begin, end, scratch->values);
  } else {
    clone_.block(call_, batch, n_task, begin, end, scratch->values);
  }
}

}  // namespace jaxlowbit
