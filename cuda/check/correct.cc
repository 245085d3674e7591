// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/correct.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "cuda/launch.h"

namespace jaxlowbit::check {
namespace {

std::string Describe(const Choice& choice) {
  char text[128];
  std::snprintf(text, sizeof(text), "%s tile %d peers %d block_m %d split_k %d slices %d",
                NameOf(choice.kernel), choice.tile, choice.peers, choice.block_m, choice.split_k,
                choice.slices);
  return text;
}

}  // namespace

bool IsCorrect(const QuantizedMatmul& problem, const DeviceProblem& data, const Choice& choice,
               int64_t max_samples) {
  const std::string what = Describe(choice) + "  " + Describe(problem, data.optional());
  uint64_t first = 0;
  for (int run = 0; run < 2; ++run) {
    data.Poison();
    Check(LaunchChoice(problem, data.buffers(0), choice, 0, nullptr), what.c_str());
    Check(cudaDeviceSynchronize(), what.c_str());
    if (run == 0) {
      first = data.Digest();
      const double ratio = data.ErrorOverBound(0, max_samples);
      if (!(ratio <= 1)) {
        std::printf("WRONG  %s: error over bound %.3g\n", what.c_str(), ratio);
        return false;
      }
    } else if (data.Digest() != first) {
      std::printf("WRONG  %s: two runs differ\n", what.c_str());
      return false;
    }
  }
  return true;
}

}  // namespace jaxlowbit::check
