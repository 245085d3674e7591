// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the toolkit's header: the parts that kernels use.
#pragma once
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  operator float() const {
    float value;
    asm("mov.b32 %0, {0, %1};" : "=f"(value) : "h"(bits));
    return value;
  }
};
