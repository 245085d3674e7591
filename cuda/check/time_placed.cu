// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/check/placed_problem.h"
#include "cuda/check/replay.h"
#include "cuda/launch.h"

namespace jaxlowbit::check {
namespace {

constexpr int kCopies = 8;  // copies of a weight, more than three times the size of L2
constexpr int kRounds = 3;
constexpr int kReplays = 30;
constexpr int kWarmUps = 100;  // until clocks are stable

// Microseconds of one call: the median of replays of a graph with kRounds of all calls.
double Time(const QuantizedMatmul& problem,
            const std::vector<std::unique_ptr<PlacedProblem>>& calls, int64_t workspace_bytes) {
  const auto enqueue = [&](cudaStream_t stream) {
    for (int round = 0; round < kRounds; ++round) {
      for (const auto& call : calls) {
        Check(LaunchProduct({problem, call->buffers()}, workspace_bytes, 0, stream),
              "LaunchProduct");
      }
    }
  };
  return TimeReplays(enqueue, kWarmUps, kReplays) / static_cast<double>(kRounds * calls.size());
}

}  // namespace

void TimePlaced() {
  const std::pair<const char*, Places> kinds[] = {
      {"apart", {}},
      {"lhs odd", {1u << kLhs}},
      {"scales odd", {1u << kScale}},
      {"words odd", {1u << kPacked}},
      {"out odd", {1u << kOut}},
      {"out over lhs", {0, kLhs}},
  };
  for (int64_t m : {1, 16, 64, 256, 1024}) {
    for (int64_t size : {4096, 8192}) {
      QuantizedMatmul problem;
      problem.m = m, problem.n = problem.k = size;
      problem.group_size = 128;
      std::vector<std::unique_ptr<DeviceProblem>> data;
      for (int i = 0; i < kCopies * (size == 4096 ? 4 : 1); ++i) {
        data.push_back(std::make_unique<DeviceProblem>(problem, Optional{}, 1, i));
      }
      std::printf("%s\n", Describe(problem, {}).c_str());
      for (const auto& [name, places] : kinds) {
        std::vector<std::unique_ptr<PlacedProblem>> calls;
        for (const auto& each : data) {
          calls.push_back(std::make_unique<PlacedProblem>(problem, each->buffers(0), places));
          calls.back()->Restore();
        }
        std::printf("  %-14s %8.2f us\n", name, Time(problem, calls, data[0]->workspace_bytes()));
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace jaxlowbit::check
