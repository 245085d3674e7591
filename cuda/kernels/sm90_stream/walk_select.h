// SPDX-License-Identifier: Apache-2.0
//
// When one launch of the walk (walk.h) replaces the products and normalizations between two attentions of a decode step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels/sm90_stream/walk_shape.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit::sm90_stream {

// Products of a layer: out, gate and up, down, and q, k and v of the next layer.
using WalkProducts = std::vector<QuantizedMatmul>;
inline constexpr size_t kWalkProducts = 6;

// Whether the walk computes the products, all of whose buffers are aligned.
Support SupportsWalk(const WalkProducts& products, const Device& device);

// The shape of supported products, and the groups of consumer warps for it.
WalkShape WalkShapeOf(const WalkProducts& products);
int WalkGroups(const WalkShape& shape);

// Whether supported products take less time than in separate kernels.
bool PrefersWalk(const WalkProducts& products);

// kAuto: as PrefersWalk says; kAlways: wherever it is supported.
enum class WalkMode { kAuto, kNever, kAlways };

// From JAXLOWBIT_WALK (0: never, 1: always) until it is set. For tests and measurements.
WalkMode CurrentWalkMode();
void SetWalkMode(WalkMode mode);

}  // namespace jaxlowbit::sm90_stream
