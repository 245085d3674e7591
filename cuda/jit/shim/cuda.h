// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the driver's header: a kernel only passes the descriptor on. Its alignment is the host's, which depends on
// the version of CUDA.
#pragma once
struct alignas(JAXLOWBIT_TENSOR_MAP_ALIGNMENT) CUtensorMap {
  unsigned long opaque[16];
};
