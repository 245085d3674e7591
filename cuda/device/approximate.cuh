// SPDX-License-Identifier: Apache-2.0
//
// Instructions of the special function unit, with relative errors of about 2^-22. They flush subnormals to zero, for
// which the C++ functions execute additional instructions.
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
