// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#define JAXLOWBIT_CLONE avx2
#define JAXLOWBIT_TARGET __attribute__((target("avx2,fma")))
#define JAXLOWBIT_LANES 8
#define JAXLOWBIT_REGISTERS 16
#include "cpu/qmm_clone.inc"
#endif
