// SPDX-License-Identifier: Apache-2.0

#include "cuda/qmm_sm90/kernel.cuh"

namespace jaxlowbit::qmm_sm90 {

template KernelFunction FindKernel<__nv_bfloat16, 4>(bool, ZeroKind, int);

}  // namespace jaxlowbit::qmm_sm90
