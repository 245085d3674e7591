// SPDX-License-Identifier: Apache-2.0
//
// Marks functions that host and device compile.
#pragma once

#if defined(__CUDACC__)
#define JAXLOWBIT_HOST_DEVICE __host__ __device__
#else
#define JAXLOWBIT_HOST_DEVICE
#endif
