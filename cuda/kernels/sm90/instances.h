// SPDX-License-Identifier: Apache-2.0
//
// The ahead-of-time instances of qmm_sm90, which several files compile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/types.h"

namespace jaxlowbit::sm90 {

struct Params;
using KernelFunction = void (*)(Params);

// The instance for this type of lhs and width.
template <typename T, int kBits>
KernelFunction FindKernel(bool float_scales, ZeroKind zero, int tile);

extern template KernelFunction FindKernel<__nv_bfloat16, 4>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__nv_bfloat16, 8>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__half, 4>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__half, 8>(bool, ZeroKind, int);

}  // namespace jaxlowbit::sm90
