// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "cuda/kernels.h"
#include "cuda/qmm_sm90_stream/config.h"
#include "cuda/tuned.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxDevices = 64;

// What is known of a device, read once.
struct DeviceState {
  std::once_flag once;
  cudaError_t error = cudaSuccess;
  Device device;
  std::shared_ptr<const TunedTable> tuned;
};

// JAXLOWBIT_MAX_COMPUTE_CAPABILITY=86 runs the kernels that a GPU of that capability would run, with
// its shared memory.
void Limit(Device& device) {
  const char* limit = std::getenv("JAXLOWBIT_MAX_COMPUTE_CAPABILITY");
  if (limit == nullptr) return;
  device.compute_capability = std::min(device.compute_capability, std::atoi(limit));
  if (device.compute_capability == 86 || device.compute_capability == 89) {
    device.shared_bytes_per_sm = std::min(device.shared_bytes_per_sm, 100 * 1024);
  }
}

cudaError_t ReadDevice(int ordinal, Device& device) {
  int major = 0, minor = 0;
  for (auto [attribute, value] :
       {std::pair{cudaDevAttrComputeCapabilityMajor, &major},
        std::pair{cudaDevAttrComputeCapabilityMinor, &minor},
        std::pair{cudaDevAttrMultiProcessorCount, &device.num_sms},
        std::pair{cudaDevAttrMaxSharedMemoryPerMultiprocessor, &device.shared_bytes_per_sm}}) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, ordinal);
    if (error != cudaSuccess) return error;
  }
  device.compute_capability = 10 * major + minor;
  Limit(device);
  return cudaSuccess;
}

cudaError_t FindTuned(int ordinal, std::shared_ptr<const TunedTable>& tuned) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error == cudaSuccess) tuned = TunedFor(properties.name);
  return error;
}

// Attributes of kernels belong to the current device.
cudaError_t Initialize(int ordinal, DeviceState& state) {
  Device& device = state.device;
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = ReadDevice(ordinal, device);
  if (error == cudaSuccess) error = FindTuned(ordinal, state.tuned);
  if (error == cudaSuccess) error = InitializeQmmSm80();
  if (error == cudaSuccess) error = InitializeQmmSm80Transposed();
  if (error == cudaSuccess) error = InitializeReduceSplits();
  if (error == cudaSuccess) error = InitializeRmsNorm();
  if (error == cudaSuccess) error = InitializeGatherLhs(device);
  if (error == cudaSuccess && device.compute_capability == 90) {
    error = InitializeQmmSm90Stream();
    if (error == cudaSuccess) error = InitializeQmmSm90(device);
  }
  const cudaError_t restored = cudaSetDevice(current);
  return error == cudaSuccess ? restored : error;
}

DeviceState& StateOf(int ordinal) {
  static std::array<DeviceState, kMaxDevices> states;
  return states[ordinal];
}

// The product of lhs as it is.
cudaError_t LaunchProduct(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, int ordinal, cudaStream_t stream) {
  if (choice.kernel == Kernel::kQmmSm90Stream) {
    const Operands product = {problem, buffers};
    return LaunchQmmSm90Stream(problem, &product, 1, choice, DeviceInfo(ordinal), stream);
  }
  if (choice.kernel == Kernel::kQmmSm90) {
    return LaunchQmmSm90(problem, buffers, choice, DeviceInfo(ordinal), stream);
  }
  const auto launch = problem.transposed ? LaunchQmmSm80Transposed : LaunchQmmSm80;
  const cudaError_t error = launch(problem, buffers, choice, stream);
  if (error != cudaSuccess || choice.split_k == 1) return error;
  return LaunchReduceSplits(problem, buffers, choice.split_k, DeviceInfo(ordinal), stream);
}

}  // namespace

cudaError_t InitializeKernels(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return cudaErrorInvalidDevice;
  DeviceState& state = StateOf(ordinal);
  std::call_once(state.once, [&] { state.error = Initialize(ordinal, state); });
  return state.error;
}

const Device& DeviceInfo(int ordinal) { return StateOf(ordinal).device; }

cudaError_t LaunchChoice(const QuantizedMatmul& problem, const Buffers& buffers,
                         const Choice& choice, int ordinal, cudaStream_t stream) {
  const Device& device = DeviceInfo(ordinal);
  if (problem.orders == 0 || Gathers(problem, device, choice)) {
    return LaunchProduct(problem, buffers, choice, ordinal, stream);
  }
  const cudaError_t error = LaunchGatherLhs(problem, buffers, device, stream);
  if (error != cudaSuccess) return error;
  QuantizedMatmul behind = problem;
  behind.early_start = true;
  Buffers stored = buffers;
  stored.lhs = buffers.gathered;
  return LaunchProduct(behind, stored, choice, ordinal, stream);
}

cudaError_t LaunchQuantizedMatmul(const QuantizedMatmul& problem, const Buffers& buffers,
                                  int64_t workspace_bytes, int ordinal, cudaStream_t stream) {
  if (problem.batch == 0 || problem.m == 0) return cudaSuccess;
  const DeviceState& state = StateOf(ordinal);
  const Choice choice = Select(problem, state.device, workspace_bytes, state.tuned.get());
  return LaunchChoice(problem, buffers, choice, ordinal, stream);
}

cudaError_t LaunchQuantizedMatmuls(std::vector<Operands> products, int64_t workspace_bytes,
                                   int ordinal, cudaStream_t stream) {
  const DeviceState& state = StateOf(ordinal);
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i < products.size() && error == cudaSuccess;) {
    Operands* first = &products[i];
    if (i > 0) first->problem.early_start = true;
    size_t count = 1;  // of the next launch
    while (i + count < products.size() && count < qmm_sm90_stream::kMaxParts &&
           MayJoin(*first, first[count])) {
      ++count;
    }
    const QuantizedMatmul joined = Join(first, count);
    if (joined.batch == 0 || joined.m == 0) return cudaSuccess;
    const bool together =
        count > 1 && Unsupported(Kernel::kQmmSm90Stream, joined, state.device).empty();
    const Choice choice =
        together ? Select(joined, state.device, workspace_bytes, state.tuned.get()) : Choice{};
    if (together && choice.kernel == Kernel::kQmmSm90Stream) {
      error = LaunchQmmSm90Stream(joined, first, count, choice, state.device, stream);
      i += count;
    } else {
      error =
          LaunchQuantizedMatmul(first->problem, first->buffers, workspace_bytes, ordinal, stream);
      ++i;
    }
  }
  return error;
}

}  // namespace jaxlowbit
