// SPDX-License-Identifier: Apache-2.0
//
// Shapes that the walk takes (walk.h), without CUDA.
#pragma once

#include <cstdint>

namespace jaxlowbit::sm90_stream {

// The products of a layer, in this order.
enum WalkStep { kWalkOut, kWalkGateUp, kWalkDown, kWalkQkv };
inline constexpr int kWalkSteps = 4;

// A decoder: columns of x; of q, k and v together; of the gate.
struct WalkShape {
  int width, qkv, mlp, layers, rows;
  int attended = 0;  // columns that o multiplies; 0: width
  constexpr int k(int step) const {
    if (step == kWalkOut && attended > 0) return attended;
    return step == kWalkDown ? mlp : width;
  }
  // Columns of a step's result; the weight of gate and up has twice as many.
  constexpr int n(int step) const {
    return step == kWalkGateUp ? mlp : step == kWalkQkv ? qkv : width;
  }
  constexpr int weights(int step) const { return step == kWalkGateUp ? 2 : 1; }
};

// Groups of 8 consumer warps at most. The k of a step is a multiple of kWalkColumns of each group.
inline constexpr int kMaxWalkGroups = 2, kMaxWalkRows = 2;
inline constexpr int kWalkColumns = 2 * 8 * 64;  // a page of both CTAs of a cluster
inline constexpr int kWalkStrip = 64;
// Most elements of a step's activations, which stay in shared memory with the ring of pages.
inline constexpr int kMaxWalkElements = 1 << 16;

// Vectors of a half of a row that the consumers can normalize (Instance::kVectors).
constexpr int MaxWalkVectors(int groups, int rows) {
  return 256 * groups * (groups == 1 && rows == 1 ? 4 : 2);
}

// Returns "" if the walk takes a shape with these groups of consumer warps, else the reason.
constexpr const char* UnsupportedWalk(const WalkShape& shape, int groups) {
  if (groups < 1 || groups > kMaxWalkGroups) return "the walk has one or two groups of warps";
  if (shape.rows < 1 || shape.rows > kMaxWalkRows) return "the walk takes one or two rows";
  if (shape.layers < 1) return "the walk has no layers";
  if (shape.width / 8 > MaxWalkVectors(groups, shape.rows)) {
    return "the walk does not normalize rows of this length";
  }
  for (int step = 0; step < kWalkSteps; ++step) {
    if (shape.k(step) < 1 || shape.k(step) % (kWalkColumns * groups) != 0) {
      return "the walk takes k of a multiple of 1024";
    }
    if (shape.n(step) < 1 || shape.n(step) % kWalkStrip != 0) {
      return "the walk takes n of a multiple of 64";
    }
    if (int64_t{shape.k(step)} * shape.rows > kMaxWalkElements) {
      return "the walk takes up to 65536 activations";
    }
  }
  return "";
}

}  // namespace jaxlowbit::sm90_stream
