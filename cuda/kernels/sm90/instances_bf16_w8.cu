// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90/instances_table.h"

namespace jaxlowbit::sm90 {

template KernelFunction FindKernel<__nv_bfloat16, 8>(bool, int);

}  // namespace jaxlowbit::sm90
