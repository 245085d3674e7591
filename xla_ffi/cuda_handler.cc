// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers. Initialize runs before every execution, outside of graph capture, and loads
// the kernels; execute only enqueues, so XLA may capture it.
#include <cuda_runtime_api.h>

#include <atomic>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

#if defined(JAXLOWBIT_COUNT_EXECUTES)
std::atomic<int64_t> execute_count{0};
#endif

ffi::Error Initialize(cudaStream_t, int32_t device) {
  return ToError(InitializeKernels(device),
                 "loading the kernels on device " + std::to_string(device));
}

ffi::Error Execute(cudaStream_t stream, int32_t device, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                   ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                   int64_t bits, int64_t group_size, bool transposed, bool scale_sums,
                   bool half_sums) {
#if defined(JAXLOWBIT_COUNT_EXECUTES)
  execute_count.fetch_add(1, std::memory_order_relaxed);
#endif
  Operands operands;
  const ffi::Error error =
      DecodeOperands(lhs, {packed, scale, zero, index}, *out,
                     {bits, group_size, transposed, scale_sums, half_sums}, &operands);
  return error.failure() ? error : Enqueue(operands, *workspace, device, stream);
}

}  // namespace

#if defined(JAXLOWBIT_COUNT_EXECUTES)
int64_t CudaExecuteCount() { return execute_count.load(std::memory_order_relaxed); }
#endif

}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaInitialize, jaxlowbit::Initialize,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaExecute, jaxlowbit::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()             // lhs
                                  .Arg<xla::ffi::AnyBuffer>()             // packed
                                  .Arg<xla::ffi::AnyBuffer>()             // scale
                                  .Arg<xla::ffi::AnyBuffer>()             // zero
                                  .Arg<xla::ffi::AnyBuffer>()             // index
                                  .Ret<xla::ffi::AnyBuffer>()             // out
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size")
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("scale_sums")
                                  .Attr<bool>("half_sums"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
