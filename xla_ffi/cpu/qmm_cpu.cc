// SPDX-License-Identifier: Apache-2.0
#include "xla_ffi/cpu/qmm_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "xla_ffi/cpu/convert.h"
#include "xla_ffi/cpu/planes.h"
#include "xla_ffi/cpu/tuning.h"

// The kernel once per instruction set: registers hold kLanes floats, and there are kRegisters.
#if defined(__x86_64__)

#define JAXLOWBIT_CLONE avx512
#define JAXLOWBIT_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define JAXLOWBIT_LANES 16
#define JAXLOWBIT_REGISTERS 32
#include "xla_ffi/cpu/qmm_clone.inc"

#define JAXLOWBIT_CLONE avx2
#define JAXLOWBIT_TARGET __attribute__((target("avx2,fma")))
#define JAXLOWBIT_LANES 8
#define JAXLOWBIT_REGISTERS 16
#include "xla_ffi/cpu/qmm_clone.inc"

#define JAXLOWBIT_REGISTERS 16
#else
#define JAXLOWBIT_REGISTERS 32
#endif

#define JAXLOWBIT_CLONE baseline
#define JAXLOWBIT_TARGET
#define JAXLOWBIT_LANES 4
#include "xla_ffi/cpu/qmm_clone.inc"

namespace jaxlowbit {

std::vector<const CpuClone*> RunnableCpuClones() {
  std::vector<const CpuClone*> clones;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    clones.push_back(&avx512::kClone);
  }
  if (has_avx2) clones.push_back(&avx2::kClone);
#endif
  clones.push_back(&baseline::kClone);
  return clones;
}

CpuMatmul::CpuMatmul(const QuantizedMatmul& problem, const Buffers& buffers, const CpuClone& clone,
                     CacheLine* permuted)
    : call_{problem, buffers},
      clone_(clone),
      stream_(problem.m <= kStreamTokens),
      n_blocks_(problem.n_blocks()),
      m_blocks_(stream_ ? std::min<int64_t>(problem.m, 1) : CeilDiv(problem.m, kBlockTokens)),
      permuted_(PermutedLines(problem) == 0 ? nullptr : permuted->values) {
  call_.permuted = permuted_;
}

int64_t CpuMatmul::PermutedLines(const QuantizedMatmul& problem) {
  if (problem.m > kStreamTokens) return 0;
  constexpr int64_t kLine = sizeof(CacheLine) / sizeof(float);
  return problem.batch * problem.m * problem.k_blocks() * kAtom / kLine;
}

void CpuMatmul::Permute() const {
  if (permuted_ != nullptr) clone_.permute(call_, permuted_);
}

size_t CpuMatmul::scratch_lines() const { return stream_ ? 0 : kScratchBytes / sizeof(CacheLine); }

void CpuMatmul::Run(int64_t task, CacheLine* scratch) const {
  const int64_t n_block = task / m_blocks_ % n_blocks_;
  const int64_t batch = task / m_blocks_ / n_blocks_;
  if (stream_) {
    clone_.stream(call_, batch, n_block);
  } else {
    const int64_t m = call_.problem.m;
    const int64_t m_block = task % m_blocks_;  // blocks of equal size, up to one token
    clone_.block(call_, batch, n_block, m * m_block / m_blocks_, m * (m_block + 1) / m_blocks_,
                 scratch->values);
  }
}

}  // namespace jaxlowbit
