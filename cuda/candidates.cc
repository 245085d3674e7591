// SPDX-License-Identifier: Apache-2.0

#include "cuda/candidates.h"

#include <algorithm>
#include <tuple>

#include "cuda/qmm_sm90/config.h"
#include "cuda/qmm_sm90_stream/config.h"

namespace jaxlowbit {
namespace {

constexpr size_t kMostOfAKernel = 12;
constexpr double kMostOverLeast = 2;  // of costs

std::vector<Choice> Sm80Choices() {
  std::vector<Choice> choices;
  for (int block_m : {8, 16, 32, 64}) {
    for (int split_k = 1; split_k <= kMaxSplitK; ++split_k) {
      Choice choice;
      choice.block_m = block_m;
      choice.split_k = split_k;
      choices.push_back(choice);
    }
  }
  return choices;
}

std::vector<Choice> StreamChoices(const QuantizedMatmul& problem) {
  namespace stream = qmm_sm90_stream;
  std::vector<Choice> choices;
  for (int cluster_ctas : {1, 2, 4}) {
    for (int slices = stream::SliceStep(problem); slices <= stream::kMaxClusterSlices;
         slices += stream::SliceStep(problem)) {
      Choice choice;
      choice.kernel = Kernel::kQmmSm90Stream;
      choice.block_m = stream::TileTokens(problem.m);
      choice.split_k = cluster_ctas;
      choice.slices = slices;
      choices.push_back(choice);
    }
  }
  return choices;
}

std::vector<Choice> Sm90Choices() {
  std::vector<Choice> choices;
  for (int tile = 0; tile < qmm_sm90::kNumTiles; ++tile) {
    for (int split_k = 1; split_k <= qmm_sm90::kMaxParts; ++split_k) {
      for (int mates : {1, 2}) {
        Choice choice;
        choice.kernel = Kernel::kQmmSm90;
        choice.block_m = qmm_sm90::kTiles[tile].tokens;
        choice.split_k = split_k;
        choice.tile = tile;
        choice.mates = mates;
        choices.push_back(choice);
      }
    }
  }
  return choices;
}

bool IsSame(const Choice& left, const Choice& right) {
  const auto fields = [](const Choice& choice) {
    return std::make_tuple(choice.kernel, choice.block_m, choice.split_k, choice.slices,
                           choice.tile, choice.mates);
  };
  return fields(left) == fields(right);
}

}  // namespace

std::vector<Choice> AllChoices(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes) {
  std::vector<Choice> choices = kernel == Kernel::kQmmSm90Stream ? StreamChoices(problem)
                                : kernel == Kernel::kQmmSm90     ? Sm90Choices()
                                                                 : Sm80Choices();
  const auto unsupported = [&](const Choice& choice) {
    return !Unsupported(choice, problem, device, workspace_bytes).empty();
  };
  choices.erase(std::remove_if(choices.begin(), choices.end(), unsupported), choices.end());
  return choices;
}

std::vector<Choice> Candidates(const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes) {
  const Choice best = Select(problem, device, workspace_bytes);
  const double most = kMostOverLeast * Cost(problem, device, best);
  std::vector<Choice> candidates = {best};
  for (Kernel kernel : {Kernel::kQmmSm90Stream, Kernel::kQmmSm90, Kernel::kQmmSm80}) {
    std::vector<std::pair<double, Choice>> choices;
    for (const Choice& choice : AllChoices(kernel, problem, device, workspace_bytes)) {
      const double cost = Cost(problem, device, choice);
      if (cost <= most && !IsSame(choice, best)) choices.emplace_back(cost, choice);
    }
    std::stable_sort(choices.begin(), choices.end(),
                     [](const auto& left, const auto& right) { return left.first < right.first; });
    if (choices.size() > kMostOfAKernel) choices.resize(kMostOfAKernel);
    for (const auto& [cost, choice] : choices) candidates.push_back(choice);
  }
  return candidates;
}

}  // namespace jaxlowbit
