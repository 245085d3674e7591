// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90/instances.h"

#include "cuda/kernels/sm90/plan.h"

namespace jaxlowbit::sm90 {

// Variants of ragged products begin here.
constexpr int kRaggedVariants = 32;
static_assert(kNumTiles <= kRaggedVariants);

int TileOf(const InstanceKey& key) { return key.variant % kRaggedVariants; }

bool IsPrebuilt(const InstanceKey& key) {
  const bool is_common =
      key.bits == 4 && key.lhs == ElementType::kBf16 && key.zero == ZeroKind::kNone;
  return IsPrebuiltFormat(key) && key.variant < (is_common ? kFloatTiles : kPrebuiltTiles);
}

InstanceKey KeyOf(const QuantizedMatmul& problem, int tile) {
  return {Family::kSm90,
          problem.lhs,
          problem.scale,
          problem.zero,
          problem.bits,
          problem.codebook,
          tile + (problem.is_ragged() ? kRaggedVariants : 0)};
}

std::string NameOf(const InstanceKey& key) {
  const std::string instance = "jaxlowbit::sm90::Instance<" + CudaName(key.lhs) + ", " +
                               CudaName(key.scale) + ", " + CudaName(key.zero) + ", " +
                               std::to_string(key.bits) + ", " + std::to_string(TileOf(key)) +
                               LastArgument(key.codebook) + ">";
  return "jaxlowbit::sm90::QmmSm90Kernel<" +
         (key.variant >= kRaggedVariants ? "jaxlowbit::sm90::RaggedInstance<" + instance + ">"
                                         : instance) +
         ">";
}

std::vector<InstanceKey> InstancesOf(int bits) {
  std::vector<InstanceKey> keys;
  ForEachFormat(Family::kSm90, bits, [&](InstanceKey key) {
    for (key.variant = 0; key.variant < kFloatTiles; ++key.variant) keys.push_back(key);
  });
  ForEachByteFormat(bits, [&](InstanceKey key) {
    for (key.variant = 0; key.variant < kNumTiles; ++key.variant) {
      const bool single_accumulator = key.lhs == ElementType::kInt8,
                 zeros = key.zero != ZeroKind::kNone;
      if (kTiles[key.variant].supports_8bit_lhs(single_accumulator, zeros)) keys.push_back(key);
    }
  });
  return keys;
}

}  // namespace jaxlowbit::sm90
