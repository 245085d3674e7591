// SPDX-License-Identifier: Apache-2.0
//
// Matrices from shared memory to fragments, transposed: ldmatrix.trans.
#pragma once

#include <cstdint>

namespace jaxlowbit {

// Loads the transposes of four 8 x 8 matrices of 16-bit values; lane i passes the address of row i % 8 of matrix i / 8
// and receives, of each matrix, element (2 * (lane % 4), lane / 4) and the one below it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
__device__ inline void LoadTransposed(uint32_t (&fragment)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

}  // namespace jaxlowbit
