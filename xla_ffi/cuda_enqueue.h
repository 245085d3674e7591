// SPDX-License-Identifier: Apache-2.0
//
// From decoded operands to the kernels, for every CUDA handler.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {

inline ffi::Error ToError(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal("jaxlowbit_quantized_matmul: " + what + " failed with " +
                              cudaGetErrorName(status) + ": " + cudaGetErrorString(status) + ".");
}

inline std::string Describe(const QuantizedMatmul& p, int device) {
  return "launching batch=" + std::to_string(p.batch) + " m=" + std::to_string(p.m) +
         " n=" + std::to_string(p.n) + " k=" + std::to_string(p.k) +
         (p.transposed ? " transposed" : "") + " bits=" + std::to_string(p.bits) +
         " group_size=" + std::to_string(p.group_size) + " on device " + std::to_string(device);
}

inline ffi::Error CheckSupported(const QuantizedMatmul& p, int device) {
  const std::string reason = Unsupported(p, DeviceInfo(device));
  return reason.empty() ? ffi::Error::Success() : Refuse(reason + "; use another backend.");
}

// Enqueues one product.
inline ffi::Error Enqueue(const Operands& operands, ffi::Buffer<ffi::U8> workspace, int device,
                          cudaStream_t stream) {
  const QuantizedMatmul& p = operands.problem;
  const ffi::Error error = CheckSupported(p, device);
  if (error.failure()) return error;
  if (p.batch == 0 || p.m == 0) return ffi::Error::Success();
  Buffers buffers = operands.buffers;
  buffers.workspace = workspace.untyped_data();
  return ToError(LaunchQuantizedMatmul(p, buffers, static_cast<int64_t>(workspace.element_count()),
                                       device, stream),
                 Describe(p, device));
}

// Enqueues several products of one lhs.
inline ffi::Error EnqueueAll(std::vector<Operands> products, ffi::Buffer<ffi::U8> workspace,
                             int device, cudaStream_t stream) {
  if (products.empty()) return ffi::Error::Success();
  for (Operands& product : products) {
    const ffi::Error error = CheckSupported(product.problem, device);
    if (error.failure()) return error;
    product.buffers.workspace = workspace.untyped_data();
  }
  const auto bytes = static_cast<int64_t>(workspace.element_count());
  return ToError(LaunchQuantizedMatmuls(products, bytes, device, stream),
                 Describe(products[0].problem, device) + " and " +
                     std::to_string(products.size() - 1) + " more products");
}

}  // namespace jaxlowbit
