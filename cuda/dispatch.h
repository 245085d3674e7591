// SPDX-License-Identifier: Apache-2.0
//
// Choosing a kernel: a pure function of the problem and a few numbers of the device. Runs, and is
// tested, without a GPU.
#pragma once

#include <string>

#include "cuda/problem.h"

namespace jaxlowbit {

// Most parts the sum over k is split into, and the most memory their partial sums take. Both are
// part of the contract with whoever allocates the workspace.
inline constexpr int kMaxSplitK = 16;
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{16} << 20;

struct Device {
  int compute_capability = 0;  // 10 * major + minor
  int num_sms = 0;
  int shared_bytes_per_sm = 0;
};

// Tile of tokens and parts of the sum over k for qmm_sm80.
struct Choice {
  int block_m = 0;
  int split_k = 1;
};

// Why no kernel computes `problem` on `device`, or an empty string.
std::string Unsupported(const QuantizedMatmul& problem, const Device& device);

// Requires that Unsupported returns "" and that m, n, k and batch are positive.
Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes);

}  // namespace jaxlowbit
