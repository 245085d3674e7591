// SPDX-License-Identifier: Apache-2.0

#include "cuda/jit/kernels.h"
#include "cuda/kernels/sm80/params.cuh"
#include "cuda/kernels/sm90/params.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::jit {

const KernelSource kKernels[kNumFamilies] = {
    {"cuda/kernels/sm80/kernel.cuh", "jaxlowbit::sm80::Params", sizeof(sm80::Params)},
    {"cuda/kernels/sm80_transposed/kernel.cuh", "jaxlowbit::sm80::Params", sizeof(sm80::Params)},
    {"cuda/kernels/sm90_stream/kernel.cuh", "jaxlowbit::sm90_stream::Params",
     sizeof(sm90_stream::Params)},
    {"cuda/kernels/sm90/kernel.cuh", "jaxlowbit::sm90::Params", sizeof(sm90::Params)},
};

}  // namespace jaxlowbit::jit
