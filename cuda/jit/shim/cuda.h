// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the driver's header: kernels only pass the descriptor on. Its alignment must equal the host's, which
// depends on the CUDA version.
#pragma once
struct alignas(JAXLOWBIT_TENSOR_MAP_ALIGNMENT) CUtensorMap {
  unsigned long opaque[16];
};
