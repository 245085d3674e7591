// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory and from shared memory to fragments: cp.async and ldmatrix.
#pragma once

#include <cstdint>

namespace jaxlowbit {

inline constexpr int kCopyBytes = 16;  // the widest cp.async, and the width of most copies here

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns `value`, opaque to the compiler. Before a loop, this keeps a value in a register instead of recomputing it.
// Applied to threadIdx or blockIdx late in a long function, it forces recomputation, which frees the register until
// then. Kernels list their uses in kernel.cuh or params.cuh.
template <typename T>
__device__ inline T Opaque(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ inline uint4 LoadShared16(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// Stores 16 bytes. A different `kCase` per branch keeps the compiler from merging branches, since merged code would
// have to index registers.
template <int kCase>
__device__ inline void StoreShared16(uint32_t shared, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};  // %5\n" ::"r"(shared), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3]), "n"(kCase)
               : "memory");
}

__device__ inline void StoreShared16(uint32_t shared, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ inline void StoreShared4(uint32_t shared, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(shared), "r"(v) : "memory");
}

__device__ inline uint2 LoadShared8(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n"
               : "=r"(v.x), "=r"(v.y)
               : "r"(shared)
               : "memory");
  return v;
}

__device__ inline uint32_t LoadShared4(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(shared) : "memory");
  return v;
}

__device__ inline uint32_t LoadShared2(uint32_t shared) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(shared) : "memory");
  return v;
}

// Copies two bytes, or zeros if `source` is null. Synchronous.
__device__ inline void StoreShared2(uint32_t shared, const void* source) {
  const uint16_t v = source == nullptr ? 0 : *static_cast<const uint16_t*>(source);
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(shared), "h"(v) : "memory");
}

// Starts copying 16 bytes, or writes zeros if `valid` is false. `source` is then not read, but must still be a global
// address.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
__device__ inline void CopyAsync(uint32_t shared, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(source),
               "r"(valid ? kCopyBytes : 0)
               : "memory");
}

// Starts copying 4 bytes from a multiple of 4 bytes, or zeros if `valid` is false.
__device__ inline void CopyAsync4(uint32_t shared, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Starts copying 16 bytes from a multiple of 4 bytes.
__device__ inline void CopyAsyncByWords(uint32_t shared, const void* source, bool valid) {
#pragma unroll
  for (int i = 0; i < kCopyBytes; i += 4) {
    CopyAsync4(shared + i, static_cast<const uint8_t*>(source) + i, valid);
  }
}

// Copies 16 bytes from any address. Synchronous.
__device__ inline void CopyBytes(uint32_t shared, const void* source, bool valid) {
#pragma unroll 1
  for (int i = 0; i < kCopyBytes; ++i) {
    const uint16_t v = valid ? static_cast<const uint8_t*>(source)[i] : 0;
    asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(shared + i), "h"(v) : "memory");
  }
}

__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `kPending` of this thread's committed groups are in flight.
template <int kPending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit values; lane i passes the address of row i % 8 of matrix i / 8 and receives, of
// each matrix, element (lane / 4, 2 * (lane % 4)) and its right neighbour.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
__device__ inline void LoadMatrices(uint32_t (&fragment)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

// Loads two such matrices: lanes 0 to 15 pass addresses.
__device__ inline void LoadMatrices(uint32_t (&fragment)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(fragment[0]), "=r"(fragment[1])
               : "r"(shared)
               : "memory");
}

}  // namespace jaxlowbit
