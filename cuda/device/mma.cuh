// SPDX-License-Identifier: Apache-2.0
//
// mma.sync m16n8k16 with 16-bit floats and float32 or float16 accumulation, sm_80 and up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxlowbit {

// Computes d[16][8] = a[16][16] * b[16][8] + c[16][8]; c defaults to d. With lane = 4 * g + t, a register contains two
// neighbours in k:
//   a[2 * v + h] = a(g + 8 * h, 8 * v + 2 * t + {0, 1})    b[v] = b(8 * v + 2 * t + {0, 1}, g)
//   d[2 * h + i] = d(g + 8 * h, 2 * t + i)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
template <typename T>
__device__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                    const float (&c)[4]);

template <>
__device__ inline void Mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

template <>
__device__ inline void Mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                   const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

template <typename T>
__device__ inline void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma<T>(d, a, b0, b1, d);
}

// Computes d += a * b with float16 accumulation: d[h] is the pair d(g + 8 * h, 2 * t + {0, 1}).
template <typename T>
__device__ void Mma(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Mma<__half>(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
      "{%0, %1};\n"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit values, two neighbours of a row per lane.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-movmatrix
__device__ inline uint32_t Transpose8x8(uint32_t matrix) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(d) : "r"(matrix));
  return d;
}

}  // namespace jaxlowbit
