// SPDX-License-Identifier: Apache-2.0
//
// Kernel templates that can be JIT-compiled.
#pragma once

#include <cstddef>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit::jit {

struct KernelSource {
  const char* header;
  const char* params;   // type of its parameter
  size_t params_bytes;  // size of that type on the host
};

extern const KernelSource kKernels[kNumFamilies];  // in the order of Family

}  // namespace jaxlowbit::jit
