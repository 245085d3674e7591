// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/instance_key.h"

#include "cuda/kernels/sm80/instances.h"
#include "cuda/kernels/sm80_transposed/instances.h"
#include "cuda/kernels/sm90/instances.h"
#include "cuda/kernels/sm90_stream/instances.h"

namespace jaxlowbit {

InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device) {
  switch (choice.kernel) {
    case Kernel::kQmmSm80:
      return problem.transposed ? sm80_transposed::KeyOf(problem, choice.block_m)
                                : sm80::KeyOf(problem, choice.block_m, device);
    case Kernel::kQmmSm90Stream:
      return sm90_stream::KeyOf(problem, choice, device);
    case Kernel::kQmmSm90:
      return sm90::KeyOf(problem, choice.tile);
  }
  return {};
}

std::string NameOf(const InstanceKey& key) {
  switch (key.family) {
    case Family::kSm80:
      return sm80::NameOf(key);
    case Family::kSm80Transposed:
      return sm80_transposed::NameOf(key);
    case Family::kSm90Stream:
      return sm90_stream::NameOf(key);
    case Family::kSm90:
      return sm90::NameOf(key);
  }
  return "";
}

std::vector<InstanceKey> InstancesOf(int bits) {
  std::vector<InstanceKey> keys;
  for (const auto& own : {sm80::InstancesOf(bits), sm80_transposed::InstancesOf(bits),
                          sm90_stream::InstancesOf(bits), sm90::InstancesOf(bits)}) {
    keys.insert(keys.end(), own.begin(), own.end());
  }
  return keys;
}

}  // namespace jaxlowbit
