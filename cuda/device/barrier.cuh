// SPDX-License-Identifier: Apache-2.0
//
// mbarrier: barriers in shared memory that count arrivals and bytes, and named barriers; sm_90 and up.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once

#include <cstdint>

namespace jaxlowbit {

inline constexpr int kBarrierBytes = 8;

// A build for compute-sanitizer (JAXLOWBIT_SANITIZER in CMakeLists.txt) avoids false positives: racecheck recognizes
// only threads that arrive at a barrier themselves, synccheck expects all threads of a barrier at one instruction, and
// memcheck reports remote stores in clusters of one CTA.
#if defined(JAXLOWBIT_SANITIZER)
inline constexpr bool kForSanitizer = true;
#define JAXLOWBIT_ONE_INSTRUCTION __noinline__
#else
inline constexpr bool kForSanitizer = false;
#define JAXLOWBIT_ONE_INSTRUCTION
#endif

// Arrivals per warp: one lane arrives after __syncwarp().
inline constexpr int kWarpArrivals = kForSanitizer ? 32 : 1;

// A phase completes after `arrivals` arrivals and all expected bytes.
__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes barriers that this thread initialized visible to the cluster and to asynchronous copies.
__device__ inline void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives once for the warp, after all earlier accesses of its lanes.
__device__ inline void ArriveAsWarp(uint32_t barrier, int lane) {
  if constexpr (kWarpArrivals == 1) __syncwarp();
  if (lane < kWarpArrivals) Arrive(barrier);
}

// Arrives at a barrier of another CTA (MapToRank) without making writes visible, for threads that only read. `arrives`:
// predicate of the instruction, to avoid a divergent branch.
__device__ inline void ArriveRemoteAfterReads(uint32_t barrier, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred own;\n"
      "setp.ne.s32 own, %1, 0;\n"
      "@own mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(arrives))
      : "memory");
}

// Release: arrives at a barrier of another CTA and makes this thread's writes visible to the waiting threads. Costs a
// device-wide fence.
__device__ inline void ArriveRemote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(barrier)
               : "memory");
}

__device__ inline void ArriveExpecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase with this parity; the first phase has parity 0. Makes writes by this CTA's threads and
// copies before their arrival visible.
__device__ inline void Wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Wait that also makes writes by other threads of the cluster visible.
__device__ inline void WaitForCluster(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// bar.sync: synchronizes `threads` threads of the CTA; `number`: from 1 to 15.
__device__ JAXLOWBIT_ONE_INSTRUCTION inline void Synchronize(int number, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

// Synchronizes `threads` threads and returns whether `value` is true in all of them.
__device__ inline bool AllOf(int number, int threads, bool value) {
  int all;
  asm volatile(
      "{\n"
      ".reg .pred own, all;\n"
      "setp.ne.s32 own, %3, 0;\n"
      "bar.red.and.pred all, %1, %2, own;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(all)
      : "r"(number), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return all != 0;
}

// Arrives at a barrier of Synchronize without waiting.
__device__ inline void ArriveForOthers(int number, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

// Returns true in one lane of the warp; all lanes must call this. In a branch on the result, the compiler knows that
// one thread runs; otherwise it compiles each TMA load to a loop over lanes, which costs about 60 cycles.
__device__ inline bool IsElected() {
  int elected;
  asm volatile(
      "{\n"
      ".reg .pred own;\n"
      "elect.sync _|own, 0xffffffff;\n"
      "selp.s32 %0, 1, 0, own;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// A position in a ring of slots and the parity of its barriers.
struct RingCursor {
  int slot, parity;
  __device__ void Advance(int num_slots) {
    if (++slot == num_slots) slot = 0, parity ^= 1;
  }
  __device__ void Advance(int count, int num_slots) {
    for (slot += count; slot >= num_slots; slot -= num_slots) parity ^= 1;
  }
};

}  // namespace jaxlowbit
