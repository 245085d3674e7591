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
  bool gathers;

  static constexpr Variant Of(const InstanceKey& key) {
    return {key.variant / 8, key.variant / 2 % 4, key.variant % 2 == 1};
  }
  constexpr int number() const { return 8 * block_m + 2 * ctas_per_sm + (gathers ? 1 : 0); }
};

// Instances for 8 rows need no more registers if they have a multiprocessor to themselves. Only those gather lhs.
inline constexpr Variant kVariants[] = {
    {8, kMaxCtasPerSm, false},  {8, kMaxCtasPerSm, true}, {16, 1, false},
    {16, kMaxCtasPerSm, false}, {32, 1, false},           {32, kMaxCtasPerSm, false}};

// The instance that computes `problem` by `choice`.
InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// The ahead-of-time instance, or null.
KernelFunction Find(const InstanceKey& key);

}  // namespace jaxlowbit::sm90_stream
