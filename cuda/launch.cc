// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>

#include "cuda/extents.h"
#include "cuda/kernels.h"
#include "cuda/placement.h"
#include "cuda/qmm_sm90_stream/config.h"
#include "cuda/tuned.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxDevices = 64;

// What is known of a device, read once. `ready` says that the rest is there, and does not change any more.
struct DeviceState {
  std::mutex mutex;
  std::atomic<bool> ready{false};
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
  if (error == cudaSuccess) error = InitializePlacement();
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

// A product within the limits of a launch, which its result does not overlap.
cudaError_t LaunchAligned(Operands product, void* workspace, int64_t workspace_bytes, int ordinal,
                          cudaStream_t stream) {
  Placement placement(workspace, workspace_bytes, stream);
  placement.Align(&product);
  // The kernel before is then one that writes an operand.
  if (placement.copied()) product.problem.early_start = false;
  product.buffers.workspace = workspace;
  const DeviceState& state = StateOf(ordinal);
  const QuantizedMatmul& p = product.problem;
  const int64_t sums_bytes = std::min(
      placement.bytes(), MostSumsBytes(p.batch * p.m * p.weights_per_element(), p.out_columns()));
  const Choice choice = Select(p, state.device, sums_bytes, state.tuned.get());
  const cudaError_t error = placement.Finish();
  return error == cudaSuccess ? LaunchChoice(p, product.buffers, choice, ordinal, stream) : error;
}

// One copy for all of those that share an lhs which is not aligned, if there is room.
void AlignSharedLhs(std::vector<Operands>* products, Placement* placement) {
  const auto& [problem, buffers] = products->front();
  const void* shared = buffers.lhs;
  if (products->size() == 1 || IsAligned(shared)) return;
  const void* place = placement->Aligned(LhsExtent(problem, buffers));
  if (place == nullptr) return;
  for (Operands& product : *products) {
    if (product.buffers.lhs == shared) product.buffers.lhs = place;
  }
  products->front().problem.early_start = false;
}

// How many rows of an lhs that is not aligned half of the workspace takes, as a multiple of the largest tile; all
// rows where that is none, or copies would not help.
int64_t RowsToCopy(const Operands& product, int64_t workspace_bytes) {
  const QuantizedMatmul& p = product.problem;
  constexpr int64_t kLargestTile = 256;
  const int64_t row_bytes = p.lhs_columns() * SizeOf(p.lhs);
  const int64_t rows = workspace_bytes / 2 / row_bytes / kLargestTile * kLargestTile;
  const bool copied = !IsAligned(product.buffers.lhs) && row_bytes % kAlignment == 0;
  return copied && p.orders == 0 && rows > 0 ? rows : std::numeric_limits<int64_t>::max();
}

// A product that its result does not overlap, as several where it is beyond the limits of a launch.
cudaError_t LaunchParts(const Operands& product, int64_t workspace_bytes, int ordinal,
                        cudaStream_t stream) {
  const QuantizedMatmul& p = product.problem;
  const LaunchLimits limits = LimitsOf(p);
  const int64_t to_copy = RowsToCopy(product, workspace_bytes);
  const int64_t most_rows = std::min(limits.rows, to_copy);
  const int64_t most_batch =
      p.m > most_rows ? 1 : std::min(limits.batch, std::max<int64_t>(to_copy / p.m, 1));
  cudaError_t error = cudaSuccess;
  for (int64_t element = 0; element < p.batch && error == cudaSuccess; element += most_batch) {
    Operands part = p.batch <= most_batch
                        ? product
                        : BatchPart(product, element, std::min(most_batch, p.batch - element));
    for (int64_t row = 0; row < p.m && error == cudaSuccess; row += most_rows) {
      Operands rows = p.m <= most_rows ? part : RowPart(part, row, std::min(most_rows, p.m - row));
      rows.problem.early_start = p.early_start && element == 0 && row == 0;
      error = LaunchAligned(rows, product.buffers.workspace, workspace_bytes, ordinal, stream);
    }
  }
  return error;
}

}  // namespace

cudaError_t InitializeKernels(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return cudaErrorInvalidDevice;
  DeviceState& state = StateOf(ordinal);
  if (state.ready.load(std::memory_order_acquire)) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.ready.load(std::memory_order_relaxed)) return cudaSuccess;
  state.device = {};
  const cudaError_t error = Initialize(ordinal, state);
  state.ready.store(error == cudaSuccess, std::memory_order_release);
  return error;
}

// A stream that is captured must not be asked, and drivers before 12.8 cannot be. Then it is the current device, which
// XLA sets before every handler.
cudaError_t DeviceOf(cudaStream_t stream, int* device) {
  cudaStreamCaptureStatus capture;
  if (cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
      capture == cudaStreamCaptureStatusNone &&
      cudaStreamGetDevice(stream, device) == cudaSuccess) {
    return cudaSuccess;
  }
  cudaGetLastError();
  return cudaGetDevice(device);
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
  behind.lhs_aligned = IsAligned(buffers.gathered);
  Buffers stored = buffers;
  stored.lhs = buffers.gathered;
  return LaunchProduct(behind, stored, choice, ordinal, stream);
}

cudaError_t LaunchQuantizedMatmul(const QuantizedMatmul& problem, const Buffers& buffers,
                                  int64_t workspace_bytes, int ordinal, cudaStream_t stream) {
  return LaunchQuantizedMatmuls({{problem, buffers}}, workspace_bytes, ordinal, stream);
}

cudaError_t LaunchQuantizedMatmuls(std::vector<Operands> products, int64_t workspace_bytes,
                                   int ordinal, cudaStream_t stream) {
  const auto is_empty = [](const Operands& product) {
    return product.problem.batch == 0 || product.problem.m == 0;
  };
  products.erase(std::remove_if(products.begin(), products.end(), is_empty), products.end());
  if (products.empty()) return cudaSuccess;
  Placement placement(products[0].buffers.workspace, workspace_bytes, stream);
  placement.RedirectResults(products.data(), products.size());
  AlignSharedLhs(&products, &placement);
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
    const bool together =
        count > 1 && Unsupported(Kernel::kQmmSm90Stream, joined, state.device).empty();
    const Choice choice =
        together ? Select(joined, state.device, placement.bytes(), state.tuned.get()) : Choice{};
    if (together && choice.kernel == Kernel::kQmmSm90Stream) {
      error = LaunchQmmSm90Stream(joined, first, count, choice, state.device, stream);
      i += count;
    } else {
      error = LaunchParts(*first, placement.bytes(), ordinal, stream);
      ++i;
    }
  }
  const cudaError_t finished = placement.Finish();
  return error == cudaSuccess ? finished : error;
}

}  // namespace jaxlowbit
