// SPDX-License-Identifier: Apache-2.0
//
// The part of a transformer between two attentions, on the CPU: a team of threads computes its products, with a barrier
// between them.
//
//   sum       = residual + attended @ out
//   hidden    = activation(gate) * up of rms_norm(sum) * norm
//   result    = sum + hidden @ down
//   following = rms_norm(result) * following_norm @ each of the following weights
#pragma once

#include "xla_ffi/call.h"

namespace jaxlowbit {

// Runs a call with these steps: multiply, normalize, multiply, multiply, normalize and, if products follow, multiply.
ffi::Error RunCpuBlock(ffi::ThreadPool pool, const Call& call);

}  // namespace jaxlowbit
