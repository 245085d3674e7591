// SPDX-License-Identifier: Apache-2.0
//
// qmm_cpu: the quantized matmul on the CPU, as independent tasks that any threads may run in any
// order. How the work is cut depends on the problem alone, so the result's bits do not depend on
// the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/problem.h"
#include "xla_ffi/cpu/attend_cpu.h"
#include "xla_ffi/cpu/rows_cpu.h"

namespace jaxlowbit {

struct alignas(64) CacheLine {
  float values[16];
};

// A problem with its buffers, as the clones see it.
struct CpuCall {
  QuantizedMatmul problem;
  Buffers buffers;
  const float* permuted = nullptr;  // [batch, k_blocks, m, 64]: lhs in the clone's order of k
};

// The kernel compiled for one instruction set.
struct CpuClone {
  const char* isa;
  // Few rows: each weight is dequantized in registers and used at once.
  void (*permute)(const CpuCall& call, float* permuted);
  void (*stream)(const CpuCall& call, int64_t batch, int64_t n_block);
  // Many rows [m_begin, m_end): weights are dequantized to `scratch` and used from there.
  void (*block)(const CpuCall& call, int64_t batch, int64_t n_block, int64_t m_begin, int64_t m_end,
                float* scratch);
  bool tiles;  // whether `block` multiplies rows of bfloat16 by AMX
  AttendClone attend;
  RowsClone rows;
};

// The clones this binary holds that this machine can run, best first. JAXLOWBIT_CPU_ISA names the one that is to be the
// first; others can then not run.
std::vector<const CpuClone*> RunnableCpuClones();

class CpuMatmul {
 public:
  // `permuted` has PermutedLines, which products with the same lhs may share.
  CpuMatmul(const QuantizedMatmul& problem, const Buffers& buffers, const CpuClone& clone,
            CacheLine* permuted);

  // None for many rows.
  static int64_t PermutedLines(const QuantizedMatmul& problem);

  // Fills `permuted` from lhs, before anything runs.
  void Permute() const;

  int64_t num_tasks() const { return call_.problem.batch * n_blocks_ * m_blocks_; }
  size_t scratch_lines() const;  // for each thread that calls Run

  void Run(int64_t task, CacheLine* scratch) const;

 private:
  CpuCall call_;
  const CpuClone& clone_;
  bool stream_, tiles_;
  int64_t n_blocks_, m_blocks_;
  float* permuted_;
};

}  // namespace jaxlowbit
