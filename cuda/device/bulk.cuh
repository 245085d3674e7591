// SPDX-License-Identifier: Apache-2.0
//
// TMA: loads and stores between global and shared memory that one thread starts, sm_90 and up. Loads report to a
// barrier.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jaxlowbit {

// The L2 policy evict-first, for data that is read once.
__device__ inline uint64_t EvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// Starts loading `bytes`. Bytes and both addresses are multiples of 16. `barrier` counts the bytes as they arrive.
__device__ inline void BulkLoad(uint32_t shared, const void* source, int bytes, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Starts loading `bytes` to L2. Bytes and address are multiples of 16. (Compiled for older architectures, it does nothing.)
__device__ inline void PrefetchToL2(const void* data, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(data), "r"(bytes) : "memory");
#endif
}

// Starts loading a tile of a tensor map of three axes, the innermost first, from this position on. Elements out of
// bounds are zeros.
__device__ inline void TmaLoad(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Loads likewise, with a policy for L2.
__device__ inline void TmaLoad(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                               uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// Loads likewise from a tensor map of four axes.
__device__ inline void TmaLoad(uint32_t shared, const CUtensorMap* map, int x, int y, int z, int w,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Starts multicasting a tile of four axes to the same shared address in several CTAs of the cluster. The barrier at
// this address in each of them counts the bytes. Bit r of `ranks` selects rank r.
__device__ inline void TmaLoadMulticast(uint32_t shared, const CUtensorMap* map, int x, int y,
                                        int z, int w, uint32_t barrier, int ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(static_cast<uint16_t>(ranks))
      : "memory");
}

// Starts storing a tile to a tensor map of three axes, without the elements out of bounds. Writes to shared memory
// must be published first (PublishShared).
__device__ inline void TmaStore(const CUtensorMap* map, int x, int y, int z, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(
          map),
      "r"(x), "r"(y), "r"(z), "r"(shared)
      : "memory");
}

// Makes this thread's writes to shared memory visible to TMA.
__device__ inline void PublishShared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ inline void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until at most `kPending` groups of this thread's stores still read shared memory.
template <int kPending>
__device__ inline void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace jaxlowbit
