// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm80_transposed/instances.h"

#include "cuda/kernels/sm80/plan.h"

namespace jaxlowbit::sm80_transposed {

// The kind of zeros, if any, is a run-time parameter of the kernel.
InstanceKey KeyOf(const QuantizedMatmul& problem, int block_m) {
  return {Family::kSm80Transposed, problem.lhs, problem.scale, ZeroKind::kNone, problem.bits,
          problem.codebook,        block_m};
}

std::string NameOf(const InstanceKey& key) {
  return "jaxlowbit::sm80::QmmSm80TransposedKernel<jaxlowbit::sm80::Instance<" + CudaName(key.lhs) +
         ", " + CudaName(key.scale) + ", " + std::to_string(key.variant) + ", " +
         std::to_string(key.bits) +
         (key.codebook == Codebook::kNone
              ? ""
              : ", jaxlowbit::sm80::PartialSums::kNone" + LastArgument(key.codebook)) +
         ">>";
}

std::vector<InstanceKey> InstancesOf(int bits) {
  std::vector<InstanceKey> keys;
  ForEachFormat(Family::kSm80Transposed, bits, [&](InstanceKey key) {
    if (key.zero != ZeroKind::kNone) return;
    for (int block_m : sm80::kBlockMs) {
      key.variant = block_m;
      keys.push_back(key);
    }
  });
  return keys;
}

}  // namespace jaxlowbit::sm80_transposed
