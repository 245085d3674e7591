// SPDX-License-Identifier: Apache-2.0
//
// The instances of qmm_sm90: their keys and names, and those that were compiled ahead of time. The variant of a key is
// the number of a tile shape.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit::sm90 {

struct Params;
using KernelFunction = void (*)(Params);

// Whether the build holds an instance: those of kBuiltTiles for all formats of its widths, those of other tiles for
// weights of 4 bits without zero points and bfloat16.
bool BuildHolds(const InstanceKey& key);

// The instance for `problem` and a tile shape.
InstanceKey KeyOf(const QuantizedMatmul& problem, int tile);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// The ahead-of-time instance, or null.
KernelFunction Find(const InstanceKey& key);

}  // namespace jaxlowbit::sm90
