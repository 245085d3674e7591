// SPDX-License-Identifier: Apache-2.0
//
// The instances of qmm_sm90_stream: keys, names, and the instances compiled ahead of time.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/sm90_stream/plan.h"

namespace jaxlowbit::sm90_stream {

struct Params;
using KernelFunction = void (*)(Params);

// How rows find their weights. kNone: by the batch element. kBlocks: blocks of rows, by the sizes of groups. kRows: single
// rows, by a list or by sizes (device/schedule/listed.cuh).
enum class Grouping { kNone, kBlocks, kRows };

// Template arguments of an instance in addition to types and width.
struct Variant {
  int block_m, ctas_per_sm;
  LhsPath lhs_path;
  Grouping grouping = Grouping::kNone;
  bool divided = false;

  static constexpr Variant Of(const InstanceKey& key) {
    return {key.variant / 16 % 64, key.variant / 4 % 4, static_cast<LhsPath>(key.variant % 4),
            static_cast<Grouping>(key.variant / kVariantsPerGrouping % 4),
            key.variant / kVariantsPerGrouping >= 4};
  }
  constexpr int number() const {
    return 16 * block_m + 4 * ctas_per_sm + static_cast<int>(lhs_path) +
           kVariantsPerGrouping * (static_cast<int>(grouping) + 4 * divided);
  }

  static constexpr int kVariantsPerGrouping = 1024;
};

// Instances of 8 rows fit two CTAs per SM, so there is none for one. Only these gather lhs.
inline constexpr Variant kVariants[] = {{8, kMaxCtasPerSm, LhsPath::kStages},
                                        {8, kMaxCtasPerSm, LhsPath::kGathers},
                                        {16, 1, LhsPath::kStages},
                                        {16, kMaxCtasPerSm, LhsPath::kStages},
                                        {32, 1, LhsPath::kStages},
                                        {32, kMaxCtasPerSm, LhsPath::kStages}};

// Whether the divided instance of a variant is compiled ahead of time: for the commonest format, under PDL.
template <typename Format>
constexpr bool HasDivided(const Format& format, const Variant& variant) {
  return format.lhs == ElementType::kBf16 && format.scale == ElementType::kBf16 &&
         format.zero == ZeroKind::kNone && format.bits == 4 && format.codebook == Codebook::kNone &&
         variant.ctas_per_sm == kMaxCtasPerSm && variant.lhs_path == LhsPath::kStages;
}

// Rounds a bfloat16 lhs. Always JIT-compiled.
inline constexpr Variant kRounds = {8, kMaxCtasPerSm, LhsPath::kRounds};

InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// The ahead-of-time instance, or null.
KernelFunction Find(const InstanceKey& key);

}  // namespace jaxlowbit::sm90_stream
