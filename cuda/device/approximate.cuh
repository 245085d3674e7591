// SPDX-License-Identifier: Apache-2.0
//
// The special function unit's own operations, right to about 2^-22. They take and return zeros for subnormals, which
// the functions of C++ treat apart, in instructions of their own.
#pragma once

namespace jaxlowbit {

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jaxlowbit
