// SPDX-License-Identifier: Apache-2.0
//
// CTAs of a cluster and each other's shared memory, sm_90 and up.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
#pragma once

#include <cstdint>

namespace jaxlowbit {

__device__ inline int ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}

// The address in the CTA of this rank that corresponds to `shared` in this CTA.
__device__ inline uint32_t MapToRank(uint32_t shared, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// Arrives at the barrier of all threads of the cluster. Makes no writes visible.
__device__ inline void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}

__device__ inline void WaitForArrivals() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Release: arrives at that barrier and makes this thread's writes visible to the waiting threads.
__device__ inline void ReleaseToCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}

// Stores a value in shared memory of another CTA, at the place of `shared`, for its threads after the next release and
// wait. All CTAs must have started.
__device__ inline void StoreToRank(const float* shared, int rank, float value) {
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("st.shared::cluster.f32 [%0], %1;\n" ::"r"(MapToRank(own, rank)), "f"(value)
               : "memory");
}

// Starts storing 16 bytes in another CTA, whose `barrier` counts them (both addresses by MapToRank).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
__device__ inline void StoreRemote(uint32_t shared, const float (&values)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(shared),
      "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
      : "memory");
}

// Starts storing 4 bytes likewise.
__device__ inline void StoreRemote(uint32_t shared, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n" ::"r"(shared),
      "r"(value), "r"(barrier)
      : "memory");
}

}  // namespace jaxlowbit
