// SPDX-License-Identifier: Apache-2.0

#include "cuda/select/ragged.h"

#include <algorithm>
#include <cmath>

namespace jaxlowbit {

int64_t ExpectedBlocks(const QuantizedMatmul& problem, int block_m) {
  const auto experts = static_cast<double>(std::max<int64_t>(problem.experts(), 1));
  const double everywhere = std::max(experts, static_cast<double>(problem.all_experts));
  const double mean = static_cast<double>(problem.m) / everywhere, spread = std::sqrt(mean);
  if (problem.listed_per_row > 0) return std::max<int64_t>(std::llround(mean * experts), 1);
  // Rows of a group are about Poisson distributed.
  double blocks = 0, sum = 0;
  const int first = std::max(0, static_cast<int>(mean - 6 * spread));
  for (int rows = first; rows <= mean + 6 * spread + 6; ++rows) {
    const double probability = std::exp(rows * std::log(mean) - mean - std::lgamma(rows + 1.0));
    blocks += probability * static_cast<double>(CeilDiv(rows, block_m));
    sum += probability;
  }
  blocks = sum > 0 ? blocks / sum : 1;
  const auto all = static_cast<int64_t>(std::llround(blocks * experts));
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
  blocks.groups_of_rows = HasOwnCtas(problem, block_m) ? 0 : kOfBlocks;
  blocks.listed_per_row = 0;
  blocks.batch = ExpectedBlocks(problem, block_m);
  blocks.num_weights = blocks.batch * problem.weights_per_element();
  blocks.m = block_m;
  return blocks;
}

}  // namespace jaxlowbit
