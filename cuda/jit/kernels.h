// SPDX-License-Identifier: Apache-2.0
//
// The kernels whose instances can be compiled where they run.
#pragma once

#include <cstddef>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit::jit {

struct KernelSource {
  const char* header;
  const char* params;   // the type of its parameter
  size_t params_bytes;  // its size on the host
};

extern const KernelSource kKernels[kNumFamilies];  // in the order of Family

}  // namespace jaxlowbit::jit
