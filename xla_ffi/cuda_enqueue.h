// SPDX-License-Identifier: Apache-2.0
//
// Launches decoded operands on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/kernels/loaded.h"
#include "cuda/launch.h"
#include "cuda/placement.h"
#include "cuda/select/cache.h"
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

// Handlers run in two stages with the same operands: Initialize, outside of graph capture and before every execution,
// loads the kernels that Execute will launch.
enum class Stage { kInitialize, kExecute };

// Stage, stream and CUDA device ordinal of a handler's execution.
struct Place {
  Stage stage;
  cudaStream_t stream = nullptr;
  int device = 0;

  explicit Place(Stage stage) : stage(stage) {}

  ffi::Error Find(cudaStream_t on) {
    stream = on;
    const ffi::Error error = ToError(DeviceOf(stream, &device), "asking a stream for its device");
    if (error.failure() || stage == Stage::kExecute) return error;
    const cudaError_t status = PrepareKernels(device);
    if (status == cudaSuccess) return error;
    return ToError(status, "loading the kernels, built for compute capabilities " +
                               std::string(JAXLOWBIT_CUDA_ARCHITECTURES) + ", on CUDA device " +
                               std::to_string(device));
  }
};

// `others`: the number of further products of the call.
inline std::string Describe(const QuantizedMatmul& p, int device, size_t others = 0) {
  return "batch=" + std::to_string(p.batch) + " m=" + std::to_string(p.m) +
         " n=" + std::to_string(p.n) + " k=" + std::to_string(p.k) +
         (p.transposed ? " transposed" : "") + " bits=" + std::to_string(p.bits) +
         " group_size=" + std::to_string(p.group_size) +
         (others > 0 ? " and " + std::to_string(others) + " more products" : "") +
         " on CUDA device " + std::to_string(device);
}

inline ffi::Error CheckSupported(const QuantizedMatmul& p, int device) {
  const Support support = SupportsCached(p, DeviceInfo(device));
  return support ? ffi::Error::Success()
                 : InvalidArgument(support.reason + "; use another backend.");
}

// Checks that redirected results fit the workspace. Python requests that space, or gives results separate buffers
// (_backends/call.py).
inline ffi::Error CheckWorkspace(int64_t needed, int64_t workspace_bytes) {
  if (needed <= workspace_bytes) return ffi::Error::Success();
  return InvalidArgument("results that lie over operands of the call take " +
                         std::to_string(needed) + " bytes of a workspace that has " +
                         std::to_string(workspace_bytes) +
                         "; put jax.lax.optimization_barrier around the result.");
}

// Scratch memory for the kernels of a call.
struct Workspace {
  void* data;
  int64_t bytes;
};

// Loads the kernels of products. Initialize may get other buffers than Execute, so buffers are ignored.
inline ffi::Error Load(const std::vector<Operands>& products, const Workspace& workspace,
                       const Place& place) {
  std::vector<QuantizedMatmul> problems;
  for (const Operands& product : products) problems.push_back(product.problem);
  const cudaError_t status = LoadProducts(problems, workspace.bytes, place.device);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ToError(
      status, "loading the kernels of " + Describe(problems[0], place.device, problems.size() - 1));
}

// Enqueues the products of one call in order; in Initialize, loads their kernels instead.
inline ffi::Error Enqueue(std::vector<Operands> products, const Workspace& workspace,
                          const Place& place) {
  if (products.empty()) return ffi::Error::Success();
  for (Operands& product : products) product.buffers.workspace = workspace.data;
  if (place.stage == Stage::kInitialize) return Load(products, workspace, place);
  const ffi::Error error =
      CheckWorkspace(RedirectedBytes(products.data(), products.size()), workspace.bytes);
  if (error.failure()) return error;
  const cudaError_t launched =
      LaunchProducts(products, workspace.bytes, place.device, place.stream);
  if (launched == cudaSuccess) return error;
  return ToError(launched,
                 "launching " + Describe(products[0].problem, place.device, products.size() - 1));
}

}  // namespace jaxlowbit
