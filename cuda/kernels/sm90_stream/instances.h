// SPDX-License-Identifier: Apache-2.0
//
// The instances of qmm_sm90_stream: their keys and names, and those that were compiled ahead of time.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/sm90_stream/plan.h"

namespace jaxlowbit::sm90_stream {

struct Params;
using KernelFunction = void (*)(Params);

// What an instance is compiled for besides the types of a problem.
struct Variant {
  int block_m, ctas_per_sm;
  LhsWay way;

  static constexpr Variant Of(const InstanceKey& key) {
    return {key.variant / 16, key.variant / 4 % 4, static_cast<LhsWay>(key.variant % 4)};
  }
  constexpr int number() const { return 16 * block_m + 4 * ctas_per_sm + static_cast<int>(way); }
};

// Instances for 8 rows need no more registers if they have a multiprocessor to themselves. Only those gather lhs.
inline constexpr Variant kVariants[] = {{8, kMaxCtasPerSm, LhsWay::kStages},
                                        {8, kMaxCtasPerSm, LhsWay::kGathers},
                                        {16, 1, LhsWay::kStages},
                                        {16, kMaxCtasPerSm, LhsWay::kStages},
                                        {32, 1, LhsWay::kStages},
                                        {32, kMaxCtasPerSm, LhsWay::kStages}};

// Rounds lhs, which is bfloat16. No build holds it.
inline constexpr Variant kRounds = {8, kMaxCtasPerSm, LhsWay::kRounds};

// The instance that computes `problem` by `choice`.
InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// The ahead-of-time instance, or null.
KernelFunction Find(const InstanceKey& key);

}  // namespace jaxlowbit::sm90_stream
