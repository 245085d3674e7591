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
__device__ inline void BulkLoad(uint32_t shared, const void* source, int bytes, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Starts copying a box of an array of three axes, the innermost first, from this position on;
// elements outside of the array are zeros.
__device__ inline void TmaLoad(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same with a policy for L2.
__device__ inline void TmaLoad(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                               uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to the same place in several CTAs of the cluster, each of whose barriers at this place is
// told; bit r of `ranks` for rank r.
__device__ inline void TmaLoadMulticast(uint32_t shared, const CUtensorMap* map, int x, int y,
                                        int z, uint32_t barrier, int ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<uint16_t>(ranks))
      : "memory");
}

// Starts storing a box of an array of three axes, without the elements outside of it. Stores to
// shared memory must be published first (PublishShared).
__device__ inline void TmaStore(const CUtensorMap* map, int x, int y, int z, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(
          map),
      "r"(x), "r"(y), "r"(z), "r"(shared)
      : "memory");
}

// Lets copies see what this thread has stored to shared memory.
__device__ inline void PublishShared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ inline void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until at most `kPending` groups of this thread's box stores still read shared memory.
template <int kPending>
__device__ inline void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace jaxlowbit
