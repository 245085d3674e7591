// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers. Initialize runs before every execution, outside of graph capture, and loads
// the kernels; execute only enqueues, so XLA may capture it. Its operands and results are those of
// operands.h, then
//
//   5 permutation      s32[parts, k / parts]: stored row r of a part of k is its row permutation[r],
//                      clamped to the part; or s32[0]: rows are in order. Not transposed
//   result 1 workspace u8[bytes]
//   result 2 gathered  T[b, m, k], lhs in the order of the stored rows, or anything if the product does not need
//                      it; or T[0] without a permutation
#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

#if defined(JAXLOWBIT_COUNT_EXECUTES)
std::atomic<int64_t> execute_count{0};
#endif

ffi::Error Initialize(cudaStream_t stream) {
  return Guard("jaxlowbit", [&] {
    Place place;
    ffi::Error error = place.Find(stream);
    if (error.failure()) return error;
    const cudaError_t status = PrepareKernels(place.device);
    if (status == cudaSuccess) return error;
    return ToError(status, "loading the kernels, built for compute capabilities " +
                               std::string(JAXLOWBIT_CUDA_ARCHITECTURES) + ", on CUDA device " +
                               std::to_string(place.device));
  });
}

ffi::Error DecodePermutation(ffi::AnyBuffer permutation, ffi::AnyBuffer gathered,
                             Operands* operands) {
  if (HasShape(permutation, {0})) return ffi::Error::Success();
  QuantizedMatmul& p = operands->problem;
  if (p.transposed) {
    return Refuse("permutation comes with a transposed product but must be [0]; order its result.");
  }
  if (permutation.dimensions().size() != 2 ||
      static_cast<int64_t>(permutation.element_count()) != p.k) {
    return Refuse("permutation has shape " + ShapeName(permutation.dimensions()) +
                  " but must be [0] or [parts, k / parts] with k = " + std::to_string(p.k) + ".");
  }
  for (const ffi::Error& error :
       {CheckType("permutation", permutation, permutation.element_type() == ffi::DataType::S32,
                  "s32"),
        CheckType("gathered", gathered, FloatType(gathered.element_type()) == p.lhs,
                  "the type of lhs"),
        CheckShape("gathered", gathered, {p.batch, p.m, p.k}, "[batch, m, k]")}) {
    if (error.failure()) return error;
  }
  p.permuted_parts = permutation.dimensions()[0];
  operands->buffers.permutation = static_cast<const int32_t*>(permutation.untyped_data());
  operands->buffers.gathered = gathered.untyped_data();
  return ffi::Error::Success();
}

ffi::Error Execute(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                   ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                   ffi::AnyBuffer permutation, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                   ffi::Result<ffi::AnyBuffer> gathered, ffi::Dictionary dictionary) {
#if defined(JAXLOWBIT_COUNT_EXECUTES)
  execute_count.fetch_add(1, std::memory_order_relaxed);
#endif
  return Guard("quantized_matmul", [&] {
    Attributes attributes(dictionary);
    const auto product = ProductAttributes::Of(&attributes);
    Operands operands;
    Place place;
    ffi::Error error = attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    if (error.success()) error = DecodePermutation(permutation, *gathered, &operands);
    return error.failure() ? error : Enqueue({operands}, Workspace(*workspace), place);
  });
}

}  // namespace

#if defined(JAXLOWBIT_COUNT_EXECUTES)
int64_t CudaExecuteCount() { return execute_count.load(std::memory_order_relaxed); }
#endif

}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaInitialize, jaxlowbit::Initialize,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaExecute, jaxlowbit::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()             // lhs
                                  .Arg<xla::ffi::AnyBuffer>()             // packed
                                  .Arg<xla::ffi::AnyBuffer>()             // scale
                                  .Arg<xla::ffi::AnyBuffer>()             // zero
                                  .Arg<xla::ffi::AnyBuffer>()             // index
                                  .Arg<xla::ffi::AnyBuffer>()             // permutation
                                  .Ret<xla::ffi::AnyBuffer>()             // out
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .Ret<xla::ffi::AnyBuffer>()             // gathered
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
