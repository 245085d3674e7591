// SPDX-License-Identifier: Apache-2.0
#define JAXLOWBIT_CLONE baseline
#define JAXLOWBIT_TARGET
#define JAXLOWBIT_LANES 4
#if defined(__x86_64__)
#define JAXLOWBIT_REGISTERS 16
#else
#define JAXLOWBIT_REGISTERS 32
#endif
#include "cpu/qmm_clone.inc"
