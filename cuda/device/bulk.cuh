// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory by one thread, reported to a barrier, sm_90 and up.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jaxlowbit {

// For what is read once: first to leave L2.
__device__ inline uint64_t EvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// Starts copying `bytes`, a multiple of 16, as are both addresses; `barrier` is told of them as they
// arrive.
__device__ inline void CopyBulk(uint32_t shared, const void* source, int bytes, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Starts copying a box of an array of three axes, the innermost first, from this position on;
// elements outside of the array are zeros.
__device__ inline void CopyBox(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

}  // namespace jaxlowbit
