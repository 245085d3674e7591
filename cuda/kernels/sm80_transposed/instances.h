// SPDX-License-Identifier: Apache-2.0
//
// The instances of qmm_sm80_transposed, all compiled at run time. Geometry, parameters, selection and launch are shared
// with qmm_sm80.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit::sm80_transposed {

// The instance for `problem` and tiles of `block_m` rows.
InstanceKey KeyOf(const QuantizedMatmul& problem, int block_m);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

}  // namespace jaxlowbit::sm80_transposed
