// SPDX-License-Identifier: Apache-2.0
//
// Errors of CUDA, as XLA's.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/kernels/loaded.h"
#include "cuda/launch.h"
#include "xla_ffi/guard.h"

namespace jaxlowbit {

// Returns an error that names the failed operation. Clears CUDA's last error, which the next query on this thread would
// return.
inline ffi::Error ToError(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();
  const std::string why = PopLoadError();
  return ffi::Error::Internal(what + " failed with " + cudaGetErrorName(status) + ": " +
                              cudaGetErrorString(status) + (why.empty() ? "" : "; ") + why + ".");
}

// The error of FindTarget.
inline ffi::Error TargetError(cudaError_t status, int ordinal) {
  if (ordinal < 0) return ToError(status, "asking a stream for its device");
  return ToError(status, "loading the kernels, built for compute capabilities " +
                             std::string(JAXLOWBIT_CUDA_ARCHITECTURES) + ", on CUDA device " +
                             std::to_string(ordinal));
}

// `others`: the number of further products of the call.
inline std::string Describe(const QuantizedMatmul& p, int device, size_t others = 0) {
  return "batch=" + std::to_string(p.batch) + " m=" + std::to_string(p.m) +
         " n=" + std::to_string(p.n) + " k=" + std::to_string(p.k) +
         (p.transposed ? " transposed" : "") + " bits=" + std::to_string(p.bits) +
         " group_size=" + std::to_string(p.group_size) +
         (others > 0 ? " and " + std::to_string(others) + " more products" : "") +
         " on CUDA device " + std::to_string(device);
}

}  // namespace jaxlowbit
