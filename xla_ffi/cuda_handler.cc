// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of one product. Execute only enqueues, so XLA may capture it. Its operands and results are those
// of operands.h, then
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

std::atomic<int64_t> execute_count{0};

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

template <Stage kStage>
ffi::Error Matmul(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                  ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                  ffi::AnyBuffer permutation, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Result<ffi::AnyBuffer> gathered,
                  ffi::Dictionary dictionary) {
  if (kStage == Stage::kExecute) execute_count.fetch_add(1, std::memory_order_relaxed);
  return Guard("quantized_matmul", [&] {
    Attributes attributes(dictionary);
    const auto product = ProductAttributes::Of(&attributes);
    Operands operands;
    Place place(kStage);
    ffi::Error error = attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    if (error.success()) error = DecodePermutation(permutation, *gathered, &operands);
    return error.failure() ? error : Enqueue({operands}, Workspace(*workspace), place);
  });
}

template <ffi::ExecutionStage kStage>
auto Bind() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()        // lhs
      .template Arg<ffi::AnyBuffer>()        // packed
      .template Arg<ffi::AnyBuffer>()        // scale
      .template Arg<ffi::AnyBuffer>()        // zero
      .template Arg<ffi::AnyBuffer>()        // index
      .template Arg<ffi::AnyBuffer>()        // permutation
      .template Ret<ffi::AnyBuffer>()        // out
      .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .template Ret<ffi::AnyBuffer>()        // gathered
      .Attrs();
}

}  // namespace

int64_t CudaExecuteCount() { return execute_count.load(std::memory_order_relaxed); }

}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaInitialize,
                              jaxlowbit::Matmul<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::Bind<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaExecute, jaxlowbit::Matmul<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::Bind<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
