// SPDX-License-Identifier: Apache-2.0
//
// The kernels of qmm_sm90, which several files compile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/problem.h"

namespace jaxlowbit::qmm_sm90 {

struct Params;
using KernelFunction = void (*)(Params);

template <typename T, int kBits>
KernelFunction FindKernel(bool float_scales, ZeroKind zero, int tile);

extern template KernelFunction FindKernel<__nv_bfloat16, 4>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__nv_bfloat16, 8>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__half, 4>(bool, ZeroKind, int);
extern template KernelFunction FindKernel<__half, 8>(bool, ZeroKind, int);

}  // namespace jaxlowbit::qmm_sm90
