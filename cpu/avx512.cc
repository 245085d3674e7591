// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#define JAXLOWBIT_CLONE avx512
#define JAXLOWBIT_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define JAXLOWBIT_LANES 16
#define JAXLOWBIT_REGISTERS 32
#include "cpu/qmm_clone.inc"
#endif
