// SPDX-License-Identifier: Apache-2.0

#include "cuda/jit/kernels.h"
#include "cuda/kernels/sm80/params.cuh"
#include "cuda/kernels/sm90/params.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::jit {

const KernelSource kKernels[kNumKernels] = {
    {"sm80", "cuda/kernels/sm80/kernel.cuh", "jaxlowbit::sm80::Params", sizeof(sm80::Params),
     false},
    {"sm80_transposed", "cuda/kernels/sm80_transposed/kernel.cuh", "jaxlowbit::sm80::Params",
     sizeof(sm80::Params), false},
    {"sm90_stream", "cuda/kernels/sm90_stream/kernel.cuh", "jaxlowbit::sm90_stream::Params",
     sizeof(sm90_stream::Params), false},
    {"sm90", "cuda/kernels/sm90/kernel.cuh", "jaxlowbit::sm90::Params", sizeof(sm90::Params), true},
};

}  // namespace jaxlowbit::jit
