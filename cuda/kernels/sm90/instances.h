// SPDX-License-Identifier: Apache-2.0
//
// The instances of qmm_sm90: keys, names, and the instances compiled ahead of time. The variant of a key is the index
// of a tile shape.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/instance_key.h"

namespace jaxlowbit::sm90 {

struct Params;
using KernelFunction = void (*)(Params);

// Whether an instance is prebuilt: the first kPrebuiltTiles tiles for every format of IsPrebuiltFormat, other tiles
// only for 4-bit weights without zeros and bfloat16 lhs.
bool IsPrebuilt(const InstanceKey& key);

// The number of the tile shape of an instance.
int TileOf(const InstanceKey& key);

// The instance for `problem` and a tile shape.
InstanceKey KeyOf(const QuantizedMatmul& problem, int tile);

std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// The ahead-of-time instance, or null.
KernelFunction Find(const InstanceKey& key);

}  // namespace jaxlowbit::sm90
