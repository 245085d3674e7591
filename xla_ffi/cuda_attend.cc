// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handler of a decode step's attention (attend_operands.h). Execute only enqueues, so XLA may capture it.
#include <cuda_runtime_api.h>

#include "cuda/ops/attend.h"
#include "xla_ffi/attend_operands.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

template <Stage kStage>
ffi::Error AttendCall(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary dictionary) {
  return Guard("attend", [&] {
    if (args.size() != kAttendOperands || rets.size() != kAttendResults) {
      return Refuse("the call has " + std::to_string(args.size()) + " operands and " +
                    std::to_string(rets.size()) + " results but must have 12 and 4.");
    }
    const AttendBuffers buffers(args, rets);
    auto workspace = rets.get<ffi::Buffer<ffi::U8>>(kAttendResults - 1);
    if (workspace.has_error()) return workspace.error();
    Attributes attributes(dictionary);
    Attend attend;
    Place place(kStage);
    ffi::Error error = DecodeAttend(buffers, &attributes, &attend);
    if (attributes.Check().failure()) return attributes.Check();
    if (error.success()) error = place.Find(stream);
    if (error.failure()) return error;
    const std::string what = DescribeAttend(attend, place.device);
    // Initialize may be given other buffers than Execute.
    const Device& device = DeviceInfo(place.device);
    if (kStage == Stage::kInitialize) return ToError(LoadAttend(attend, device), "loading " + what);
    error = CheckApart(buffers);
    if (error.failure()) return error;
    const Workspace room(**workspace);
    return ToError(LaunchAttend(attend, room.data, room.bytes, device, stream),
                   "launching " + what);
  });
}

template <ffi::ExecutionStage kStage>
auto BindAttend() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaAttendInitialize,
                              jaxlowbit::AttendCall<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::BindAttend<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaAttendExecute,
                              jaxlowbit::AttendCall<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::BindAttend<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
