// SPDX-License-Identifier: Apache-2.0
//
// Counter-based random numbers: the same on host and device, and in every run.
#pragma once

#include <cmath>
#include <cstdint>

namespace jaxlowbit::check {

__host__ __device__ inline uint32_t Hash(uint64_t x) {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((x ^ (x >> 31)) >> 16);
}

__device__ inline float Normal(uint64_t x) {
  const float u = (Hash(2 * x) + 1.0f) * 0x1p-32f, v = Hash(2 * x + 1) * 0x1p-32f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

}  // namespace jaxlowbit::check
