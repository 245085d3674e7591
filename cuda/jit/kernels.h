// SPDX-License-Identifier: Apache-2.0
//
// The kernels whose instances can be compiled where they run.
#pragma once

#include <cstddef>

namespace jaxlowbit::jit {

struct KernelSource {
  const char* name;
  const char* header;
  const char* params;   // the type of its parameter
  size_t params_bytes;  // its size on the host
  bool wgmma;           // compiler.h
};

inline constexpr int kNumKernels = 4;
extern const KernelSource kKernels[kNumKernels];

}  // namespace jaxlowbit::jit
