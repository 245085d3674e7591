// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch: a kernel that starts while the kernel before it in the stream still
// runs, and waits for it where its code says so (device/dependency.cuh).
//
// A kernel before it that started early itself has waited for the one before that, in every CTA that
// goes on. So kernels end in the order of their launches, and one that has waited can read what any
// of them wrote, and write what any of them read.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxlowbit {

// A multiprocessor divides its memory into L1 and shared memory for the kernel that finds it empty, by default
// so that this one fits, and a CTA of the next kernel waits where there is no room for it beside. So each kernel
// that others may start beside asks for as much as there is. Loads the kernel.
inline cudaError_t PreferSharedMemory(const void* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// For kernels of compute capability 9.0 and up.
inline cudaLaunchAttribute EarlyStart() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace jaxlowbit
