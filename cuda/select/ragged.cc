// SPDX-License-Identifier: Apache-2.0

#include "cuda/select/ragged.h"

#include <algorithm>
#include <cmath>

namespace jaxlowbit {

int64_t ExpectedBlocks(const QuantizedMatmul& problem, int block_m) {
  const auto experts = static_cast<double>(std::max<int64_t>(problem.experts(), 1));
  const double mean = static_cast<double>(problem.m) / experts;
  // Rows of a group are about Poisson distributed. For large means their quotient by block_m is uniform.
  double blocks = mean / block_m + 0.5;
  if (mean < 200) {
    double probability = std::exp(-mean);
    blocks = 0;
    for (int rows = 1; rows < 1000 && (rows < mean || probability > 1e-9); ++rows) {
      probability *= mean / rows;
      blocks += probability * static_cast<double>(CeilDiv(rows, block_m));
    }
  }
  const auto all = static_cast<int64_t>(std::ceil(blocks * experts));
  return std::clamp<int64_t>(all, 1, std::max<int64_t>(problem.m, 1));
}

int64_t MaxBlocks(const QuantizedMatmul& problem, int block_m) {
  constexpr int64_t kWithoutWeight =
      2;  // ranges of rows: before and behind the groups with weights
  return std::min(problem.m, problem.m / block_m + problem.experts() + kWithoutWeight);
}

int GroupTableBytes(const QuantizedMatmul& problem) {
  constexpr int64_t kTotals = 16, kEntry = 8;
  return static_cast<int>(CeilDiv(kTotals + (problem.experts() + 1) * kEntry, kTotals) * kTotals);
}

QuantizedMatmul BlocksOf(const QuantizedMatmul& problem, int block_m) {
  if (!problem.is_ragged()) return problem;
  QuantizedMatmul blocks = problem;
  blocks.groups_of_rows = 0;
  blocks.of_blocks = true;
  blocks.batch = ExpectedBlocks(problem, block_m);
  blocks.num_weights = blocks.batch * problem.weights_per_element();
  blocks.m = block_m;
  return blocks;
}

}  // namespace jaxlowbit
