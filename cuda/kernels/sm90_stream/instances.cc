// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90_stream/instances.h"

#include "cuda/kernels/sm90_stream/select.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm90_stream {

InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device) {
  // Under PDL, one CTA per SM leaves registers for a CTA of the next kernel.
  const QuantizedMatmul blocks = BlocksOf(problem, choice.block_m);
  const int block_m = BlockM(blocks.m);
  const bool shares_registers = block_m == 8 || problem.pdl;
  const Grouping grouping = !problem.is_ragged()                  ? Grouping::kNone
                            : HasOwnCtas(problem, choice.block_m) ? Grouping::kRows
                                                                  : Grouping::kBlocks;
  const Variant variant = {block_m,
                           shares_registers ? kMaxCtasPerSm : CtasPerSm(blocks, device, choice),
                           LhsPathOf(blocks, device, choice), grouping, problem.divided};
  return {Family::kSm90Stream, problem.lhs,      problem.scale,   problem.zero,
          problem.bits,        problem.codebook, variant.number()};
}

std::string NameOf(const InstanceKey& key) {
  constexpr const char* kPaths[] = {"kStages", "kGathers", "kRounds"};
  const Variant variant = Variant::Of(key);
  const std::string instance =
      "jaxlowbit::sm90_stream::Instance<" + CudaName(key.lhs) + ", " + CudaName(key.scale) + ", " +
      CudaName(key.zero) + ", " + std::to_string(variant.block_m) + ", " +
      std::to_string(key.bits) + ", " + std::to_string(variant.ctas_per_sm) +
      ", jaxlowbit::sm90_stream::LhsPath::" + kPaths[static_cast<int>(variant.lhs_path)] +
      LastArgument(key.codebook) + ">";
  constexpr const char* kGroupings[] = {"", "Ragged", "Listed"};
  const std::string kind =
      variant.divided ? "Divided" : kGroupings[static_cast<int>(variant.grouping)];
  const std::string begin = "jaxlowbit::sm90_stream::QmmSm90StreamKernel<";
  return kind.empty() ? begin + instance + ">"
                      : begin + "jaxlowbit::sm90_stream::" + kind + "Instance<" + instance + ">>";
}

std::vector<InstanceKey> InstancesOf(int bits) {
  std::vector<InstanceKey> keys;
  ForEachFormat(Family::kSm90Stream, bits, [&](InstanceKey key) {
    for (Variant variant : kVariants) {
      key.variant = variant.number();
      if (variant.block_m <= MaxRows(bits, key.scale)) keys.push_back(key);
      if (!HasDivided(key, variant)) continue;
      variant.divided = true;
      key.variant = variant.number();
      keys.push_back(key);
    }
    key.variant = kRounds.number();
    if (key.lhs == ElementType::kBf16 && !HasTwoLevels(key.scale)) keys.push_back(key);
  });
  return keys;
}

}  // namespace jaxlowbit::sm90_stream
