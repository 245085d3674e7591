// SPDX-License-Identifier: Apache-2.0
//
// wgmma: asynchronous matrix products of a warpgroup (four warps), sm_90a only. Operand A comes from registers,
// operand B from shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/format/scale.cuh"

namespace jaxlowbit {

// setmaxnreg: sets the registers per thread of a warpgroup, to fewer (Release) or more (Acquire).
template <int kRegisters>
__device__ inline void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void AcquireRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Compiler barrier for registers that wgmma reads or writes asynchronously (CUTLASS: warpgroup_fence_operand). The
// fence instructions of wgmma do not tell the compiler about registers.
template <int kRows, int kColumns>
__device__ inline void FenceRegisters(uint32_t (&values)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) {
    asm volatile("" : "+r"(values[i / kColumns][i % kColumns])::"memory");
  }
}
template <int kColumns>
__device__ inline void FenceRegisters(int (&values)[kColumns]) {
#pragma unroll
  for (int& value : values) asm volatile("" : "+r"(value)::"memory");
}
template <int kColumns>
__device__ inline void FenceRegisters(float (&values)[kColumns]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}
template <int kRows, int kColumns>
__device__ inline void FenceRegisters(float (&values)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) {
    asm volatile("" : "+f"(values[i / kColumns][i % kColumns])::"memory");
  }
}

// wgmma.fence. Must precede wgmma whose register operands this thread has written since the last call.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Ends a group of wgmma.
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most `kPending` groups are in flight. Until then code must neither write their registers nor read
// their accumulators; the compiler does not know that they are in use.
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// The low 32 bits of operand B's descriptor; the others do not depend on the address. The operand has rows of 128 bytes
// (64 values along k) with chunk c of 16 bytes at c ^ (row % 8), as TMA stores swizzled tiles (kernels/tensor_map.h),
// and begins at `shared`, a multiple of 1024. Add kStepDescription per step of 16 values.
inline constexpr uint32_t kStepDescription = 32 >> 4;
__device__ inline uint32_t DescribeOperand(uint32_t shared) {
  constexpr uint32_t kUnused = 1 << 16;  // stride of the other axis
  return shared >> 4 | kUnused;
}
inline constexpr uint32_t kEightRows = 1024 >> 4, kSwizzle128 = 1 << 30;

// Computes d[64][kN] += a[64][16] * b[16][kN]. Warp w of the warpgroup has rows 16 w + {g, g + 8}: fragments are those
// of mma.cuh, and d has four registers for every 8 columns.
template <typename T, int kN>
struct WarpgroupMma;

// Lists of the registers of d: asm operands (D) and their placeholders in the instruction's text (TEXT).
#define JAXLOWBIT_D8(c, d, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define JAXLOWBIT_D16(c, d, i) JAXLOWBIT_D8(c, d, i), JAXLOWBIT_D8(c, d, i + 8)
#define JAXLOWBIT_D32(c, d, i) JAXLOWBIT_D16(c, d, i), JAXLOWBIT_D16(c, d, i + 16)
#define JAXLOWBIT_D64(c, d, i) JAXLOWBIT_D32(c, d, i), JAXLOWBIT_D32(c, d, i + 32)
#define JAXLOWBIT_D24(c, d, i) JAXLOWBIT_D16(c, d, i), JAXLOWBIT_D8(c, d, i + 16)
#define JAXLOWBIT_D40(c, d, i) JAXLOWBIT_D32(c, d, i), JAXLOWBIT_D8(c, d, i + 32)
#define JAXLOWBIT_D48(c, d, i) JAXLOWBIT_D32(c, d, i), JAXLOWBIT_D16(c, d, i + 32)
#define JAXLOWBIT_D56(c, d, i) \
  JAXLOWBIT_D32(c, d, i), JAXLOWBIT_D16(c, d, i + 32), JAXLOWBIT_D8(c, d, i + 48)
#define JAXLOWBIT_D72(c, d, i) JAXLOWBIT_D64(c, d, i), JAXLOWBIT_D8(c, d, i + 64)
#define JAXLOWBIT_D80(c, d, i) JAXLOWBIT_D64(c, d, i), JAXLOWBIT_D16(c, d, i + 64)
#define JAXLOWBIT_D96(c, d, i) JAXLOWBIT_D64(c, d, i), JAXLOWBIT_D32(c, d, i + 64)
#define JAXLOWBIT_D112(c, d, i) \
  JAXLOWBIT_D64(c, d, i), JAXLOWBIT_D32(c, d, i + 64), JAXLOWBIT_D16(c, d, i + 96)
#define JAXLOWBIT_D128(c, d, i) JAXLOWBIT_D64(c, d, i), JAXLOWBIT_D64(c, d, i + 64)
#define JAXLOWBIT_TEXT16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAXLOWBIT_TEXT24 JAXLOWBIT_TEXT16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAXLOWBIT_TEXT32 JAXLOWBIT_TEXT24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JAXLOWBIT_TEXT40 JAXLOWBIT_TEXT32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAXLOWBIT_TEXT48 JAXLOWBIT_TEXT40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAXLOWBIT_TEXT56 JAXLOWBIT_TEXT48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAXLOWBIT_TEXT64 JAXLOWBIT_TEXT56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAXLOWBIT_TEXT72 JAXLOWBIT_TEXT64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JAXLOWBIT_TEXT80 JAXLOWBIT_TEXT72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JAXLOWBIT_TEXT96 \
  JAXLOWBIT_TEXT80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAXLOWBIT_TEXT112                                                                    \
  JAXLOWBIT_TEXT96                                                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111"
#define JAXLOWBIT_TEXT128                                                                  \
  JAXLOWBIT_TEXT112                                                                        \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"

#define JAXLOWBIT_WARPGROUP_MMA(Type, kind, n, count, a0, a1, a2, a3, b, c)                       \
  template <>                                                                                     \
  struct WarpgroupMma<Type, n> {                                                                  \
    static __device__ void Run(float (&d)[count], const uint32_t (&a)[4], uint32_t description) { \
      asm volatile("{\n.reg .b64 description;\nmov.b64 description, {%" #b ", %" #c               \
                   "};\n"                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." kind "." kind                \
                   " {" JAXLOWBIT_TEXT##count "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3           \
                                              "}, "                                               \
                                              "description, 1, 1, 1, 0;\n}\n"                     \
                   : JAXLOWBIT_D##count("+f", d, 0)                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(description),                \
                     "n"(kEightRows | kSwizzle128));                                              \
    }                                                                                             \
  };
#define JAXLOWBIT_WARPGROUP_MMAS(Type, kind)                                  \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 32, 16, 16, 17, 18, 19, 20, 21)         \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 48, 24, 24, 25, 26, 27, 28, 29)         \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 64, 32, 32, 33, 34, 35, 36, 37)         \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 80, 40, 40, 41, 42, 43, 44, 45)         \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 96, 48, 48, 49, 50, 51, 52, 53)         \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 112, 56, 56, 57, 58, 59, 60, 61)        \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 128, 64, 64, 65, 66, 67, 68, 69)        \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 144, 72, 72, 73, 74, 75, 76, 77)        \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 160, 80, 80, 81, 82, 83, 84, 85)        \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 192, 96, 96, 97, 98, 99, 100, 101)      \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 224, 112, 112, 113, 114, 115, 116, 117) \
  JAXLOWBIT_WARPGROUP_MMA(Type, kind, 256, 128, 128, 129, 130, 131, 132, 133)

JAXLOWBIT_WARPGROUP_MMAS(__nv_bfloat16, "bf16")
JAXLOWBIT_WARPGROUP_MMAS(__half, "f16")

// Computes d[64][kN] = a[64][32] * b[32][kN] with 8-bit operands, added to d if `adds` is not 0.
template <typename T, int kN>
struct WarpgroupMmaBytes;

#define JAXLOWBIT_WARPGROUP_MMA_BYTES(Type, Sum, constraint, kinds, negates, n, count, a0, a1, a2, \
                                      a3, b, c, e)                                                 \
  template <>                                                                                      \
  struct WarpgroupMmaBytes<Type, n> {                                                              \
    static __device__ void Run(Sum (&d)[count], const uint32_t (&a)[4], uint32_t description,      \
                               int adds) {                                                         \
      asm volatile("{\n.reg .b64 description;\n.reg .pred adds;\nmov.b64 description, {%" #b       \
                   ", %" #c "};\nsetp.ne.s32 adds, %" #e                                           \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32." kinds " {" JAXLOWBIT_TEXT##count  \
                   "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, description, adds" negates        \
                   ";\n}\n"                                                                        \
                   : JAXLOWBIT_D##count(constraint, d, 0)                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(description),                 \
                     "n"(kEightRows | kSwizzle128), "r"(adds));                                    \
    }                                                                                              \
  };
#define JAXLOWBIT_WARPGROUP_MMAS_BYTES(...)                                               \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 32, 16, 16, 17, 18, 19, 20, 21, 22)          \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 48, 24, 24, 25, 26, 27, 28, 29, 30)          \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 64, 32, 32, 33, 34, 35, 36, 37, 38)          \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 80, 40, 40, 41, 42, 43, 44, 45, 46)          \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 96, 48, 48, 49, 50, 51, 52, 53, 54)          \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 112, 56, 56, 57, 58, 59, 60, 61, 62)         \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 128, 64, 64, 65, 66, 67, 68, 69, 70)         \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 144, 72, 72, 73, 74, 75, 76, 77, 78)         \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 160, 80, 80, 81, 82, 83, 84, 85, 86)         \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 192, 96, 96, 97, 98, 99, 100, 101, 102)      \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 224, 112, 112, 113, 114, 115, 116, 117, 118) \
  JAXLOWBIT_WARPGROUP_MMA_BYTES(__VA_ARGS__, 256, 128, 128, 129, 130, 131, 132, 133, 134)

JAXLOWBIT_WARPGROUP_MMAS_BYTES(int8_t, int, "+r", "s32.s8.s8", "")
JAXLOWBIT_WARPGROUP_MMAS_BYTES(E4m3, float, "+f", "f32.e4m3.e4m3", ", 1, 1")

#undef JAXLOWBIT_WARPGROUP_MMAS_BYTES
#undef JAXLOWBIT_WARPGROUP_MMA_BYTES
#undef JAXLOWBIT_WARPGROUP_MMAS
#undef JAXLOWBIT_WARPGROUP_MMA
#undef JAXLOWBIT_TEXT128
#undef JAXLOWBIT_TEXT112
#undef JAXLOWBIT_TEXT96
#undef JAXLOWBIT_TEXT80
#undef JAXLOWBIT_TEXT72
#undef JAXLOWBIT_TEXT64
#undef JAXLOWBIT_TEXT56
#undef JAXLOWBIT_TEXT48
#undef JAXLOWBIT_TEXT40
#undef JAXLOWBIT_TEXT32
#undef JAXLOWBIT_TEXT24
#undef JAXLOWBIT_TEXT16
#undef JAXLOWBIT_D128
#undef JAXLOWBIT_D112
#undef JAXLOWBIT_D96
#undef JAXLOWBIT_D80
#undef JAXLOWBIT_D72
#undef JAXLOWBIT_D64
#undef JAXLOWBIT_D56
#undef JAXLOWBIT_D48
#undef JAXLOWBIT_D40
#undef JAXLOWBIT_D32
#undef JAXLOWBIT_D24
#undef JAXLOWBIT_D16
#undef JAXLOWBIT_D8

}  // namespace jaxlowbit
