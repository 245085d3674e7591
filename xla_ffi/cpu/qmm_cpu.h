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
};

// The clones this binary holds that this machine can run, best first.
std::vector<const CpuClone*> RunnableCpuClones();

class CpuMatmul {
 public:
  CpuMatmul(const QuantizedMatmul& problem, const Buffers& buffers, const CpuClone& clone);
  CpuMatmul(const CpuMatmul&) = delete;  // call_ points into permuted_
  CpuMatmul& operator=(const CpuMatmul&) = delete;

  int64_t num_tasks() const { return call_.problem.batch * n_blocks_ * m_blocks_; }
  size_t scratch_lines() const;  // for each thread that calls Run

  void Run(int64_t task, CacheLine* scratch) const;

 private:
  CpuCall call_;
  const CpuClone& clone_;
  bool stream_;
  int64_t n_blocks_, m_blocks_;
  std::vector<CacheLine> permuted_;
};

}  // namespace jaxlowbit
