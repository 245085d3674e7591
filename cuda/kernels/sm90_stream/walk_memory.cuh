// SPDX-License-Identifier: Apache-2.0
//
// Instructions of the walk: polled data and counters in global memory, polled barriers, time.
#pragma once

#include <cstdint>

namespace jaxlowbit::sm90_stream {

// Two entries.
struct EntryPair {
  uint64_t first, second;
};

// Relaxed: each entry is written and read whole, and its flag tells whether it is there, so order does not matter.
__device__ inline EntryPair LoadEntries(const uint64_t* place) {
  EntryPair pair;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(place)
               : "memory");
  return pair;
}

// Global memory that no kernel writes.
__device__ inline uint2 LoadConstant8(const void* place) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(place));
  return v;
}

__device__ inline float4 LoadConstant16(const void* place) {
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(place));
  return v;
}

__device__ inline uint64_t LoadRelaxed(const void* place) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];\n" : "=l"(value) : "l"(place) : "memory");
  return value;
}

__device__ inline void StoreRelaxed(void* place, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(place), "l"(value) : "memory");
}

__device__ inline void AddRelaxed(void* place, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;\n" ::"l"(place), "l"(value) : "memory");
}

__device__ inline uint64_t Nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(time));
  return time;
}

__device__ inline uint64_t Clock() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%clock64;\n" : "=l"(time)::"memory");
  return time;
}

__device__ inline void Sleep(int nanoseconds) {
  asm volatile("nanosleep.u32 %0;\n" ::"r"(nanoseconds) : "memory");
}

// Whether the phase of this parity has ended, after at most a short suspension.
__device__ inline bool TryWait(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ inline void StoreShared8(uint32_t shared, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(shared), "r"(v.x), "r"(v.y) : "memory");
}

}  // namespace jaxlowbit::sm90_stream
