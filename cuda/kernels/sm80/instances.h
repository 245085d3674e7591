// SPDX-License-Identifier: Apache-2.0
//
// The instances of qmm_sm80: keys, names, and the instances compiled ahead of time.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit::sm80 {

struct Params;
using KernelFunction = void (*)(Params);

// The values of PartialSums (params.cuh) for host code; instances.cu checks them. Only kPlainSums is prebuilt.
inline constexpr int kPlainSums = 0, kGroupSums = 1, kHalfStageSums = 2;

// The parameters of an instance in addition to types and width. `partial_sums`: one of the numbers above.
struct Variant {
  int block_m;
  int partial_sums;
  bool ragged = false;  // not prebuilt

  static constexpr Variant Of(const InstanceKey& key) {
    return {key.variant / 8, key.variant % 4, key.variant / 4 % 2 != 0};
  }
  constexpr int number() const { return 8 * block_m + 4 * static_cast<int>(ragged) + partial_sums; }
};

// The instance for `problem` and tiles of `block_m` rows. Without a compiler it accumulates in float32 even if float16
// is allowed, since float16 instances are not prebuilt.
InstanceKey KeyOf(const QuantizedMatmul& problem, int block_m, const Device& device);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// The ahead-of-time instance, or null.
KernelFunction Find(const InstanceKey& key);

}  // namespace jaxlowbit::sm80
