// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm80/select.h"

#include <algorithm>
#include <iterator>

#include "cuda/kernels/number_costs.h"
#include "cuda/kernels/sm80/costs.h"
#include "cuda/kernels/sm80/plan.h"
#include "cuda/limits.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm80 {
namespace {

// Stages along the reduced dimension: k, or n of the transposed product.
int64_t NumStagesOf(const QuantizedMatmul& problem) {
  return CeilDiv(problem.lhs_columns(), BlockK(problem.bits));
}

// Maximum number of slices of k; each has at least one stage.
int MaxSplitK(const QuantizedMatmul& problem) {
  return static_cast<int>(std::min<int64_t>(kMaxSplitK, NumStagesOf(problem)));
}

int64_t WorkspaceBytes(const QuantizedMatmul& problem, int split_k) {
  return split_k * problem.batch * problem.m * problem.weights_per_element() *
         CeilDiv(problem.out_columns(), kAtom) * kAtom * static_cast<int64_t>(sizeof(float));
}

bool FitsWorkspace(const QuantizedMatmul& problem, int split_k, int64_t workspace_bytes) {
  return split_k == 1 || WorkspaceBytes(problem, split_k) <= workspace_bytes;
}

// Register bytes per accumulator (CtasByRegisters).
int AccumulatorBytes(const QuantizedMatmul& problem) {
  if (problem.transposed || problem.scale_accumulators) return 8;
  return problem.may_accumulate_float16() ? 6 : 4;
}

// Resident CTAs per SM.
int64_t ResidentCtas(const QuantizedMatmul& problem, const Device& device, int block_m) {
  const int bytes = SharedBytesOf(problem, block_m) + kReservedSharedBytes;
  return std::clamp(device.shared_bytes_per_sm / bytes, 1,
                    CtasByRegisters(block_m, AccumulatorBytes(problem)));
}

Choice ChoiceOf(int block_m, int split_k) {
  Choice choice;
  choice.block_m = block_m;
  choice.split_k = split_k;
  return choice;
}

}  // namespace

Support SupportsProblem(const QuantizedMatmul&, const Device&) { return {}; }

Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device&,
                       int64_t workspace_bytes) {
  const auto has = [&](const auto& block_ms) {
    return std::find(std::begin(block_ms), std::end(block_ms), choice.block_m) !=
           std::end(block_ms);
  };
  if (!(problem.scale_accumulators ? has(kScaleAccumulatorsBlockMs) : has(kBlockMs))) {
    return {"block_m is none of its tiles"};
  }
  if (choice.split_k < 1 || choice.split_k > MaxSplitK(problem)) {
    return {"split_k is beyond its stages"};
  }
  if (!FitsWorkspace(problem, choice.split_k, workspace_bytes)) {
    return {"its partial sums do not fit the workspace"};
  }
  return {};
}

std::vector<Choice> Choices(const QuantizedMatmul&) {
  std::vector<Choice> choices;
  for (int block_m : kBlockMs) {
    for (int split_k = 1; split_k <= kMaxSplitK; ++split_k) {
      choices.push_back(ChoiceOf(block_m, split_k));
    }
  }
  return choices;
}

// Chooses the smallest tile of at least m rows, and the split.
Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes) {
  const int largest = problem.scale_accumulators ? 32 : 64;
  const int block_m = *std::find_if(std::begin(kBlockMs), std::end(kBlockMs),
                                    [&](int rows) { return rows >= problem.m || rows == largest; });
  Choice best = ChoiceOf(block_m, 1);
  double min_cost = Cost(problem, device, best);
  const auto consider = [&](int rows) {
    for (int split_k = 1; split_k <= MaxSplitK(problem); ++split_k) {
      if (!FitsWorkspace(problem, split_k, workspace_bytes)) break;
      const Choice choice = ChoiceOf(rows, split_k);
      const double cost = Cost(problem, device, choice);
      if (cost >= min_cost) continue;
      min_cost = cost;
      best = choice;
    }
  };
  consider(block_m);
  // With small weights, two small tiles may occupy the device better than a large one.
  if (block_m == 64 && problem.m <= 64 && !problem.transposed) consider(32);
  return best;
}

double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs) {
  const int block_m = choice.block_m, split_k = choice.split_k;
  const auto number = std::find(std::begin(kBlockMs), std::end(kBlockMs), block_m);
  const Costs::Tile& tile = costs.tiles[number - std::begin(kBlockMs)];
  const int64_t tiles = CeilDiv(problem.m, block_m) * OutTiles(problem) * problem.batch;
  // CTAs of the busiest SM.
  const int64_t ctas = CeilDiv(tiles * split_k, device.num_sms);
  const int64_t resident_ctas = std::min(ctas, ResidentCtas(problem, device, block_m));
  const double sums = split_k > 1 ? block_m * costs.sums : 0;
  const double stages =
      static_cast<double>(CeilDiv(NumStagesOf(problem), split_k)) + costs.start + sums;
  const double overlap = tile.shared + (1 - tile.shared) / static_cast<double>(resident_ctas);
  const double numbers =
      NumbersAtom(problem) * BlockK(problem.bits) / kAtom * (kBlockN / kAtom);  // of a stage
  const double computed =
      static_cast<double>(ctas) * stages * (overlap * tile.stage[problem.bits > 4] + numbers);
  const double bytes = static_cast<double>(problem.strips() * problem.k_blocks() * problem.batch) *
                       kAtom * kAtom * problem.bits / 8;
  const double read = bytes / (costs.read_bytes * RelativeMemoryRate(device));
  return std::max(computed, read) + (split_k > 1 ? tile.reduce : 0) + tile.once;
}

int64_t OutTiles(const QuantizedMatmul& problem) {
  return problem.epilogue.gated ? problem.n_blocks()
                                : CeilDiv(problem.out_columns(), BlockOut(problem.transposed));
}

int SharedBytesOf(const QuantizedMatmul& problem, int block_m) {
  const int ring = SharedBytes(block_m, problem.bits, problem.group_size,
                               static_cast<int>(problem.scale_bytes()),
                               static_cast<int>(problem.zero_bytes()), problem.transposed);
  return problem.is_ragged() ? std::max(ring, GroupTableBytes(problem)) : ring;
}

}  // namespace jaxlowbit::sm80
