// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__) && defined(__linux__)
#define JAXLOWBIT_CLONE amx
#define JAXLOWBIT_NEXT vnni
#define JAXLOWBIT_TARGET                                                          \
  __attribute__((                                                                 \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma," \
             "amx-tile,amx-bf16")))
#define JAXLOWBIT_LANES 16
#define JAXLOWBIT_REGISTERS 32
#define JAXLOWBIT_AMX
#include "cpu/qmm_clone.inc"
#endif
