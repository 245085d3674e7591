// SPDX-License-Identifier: Apache-2.0

#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/extents.h"
#include "cuda/kernels/sm80/launch.h"
#include "cuda/kernels/sm80/plan.h"
#include "cuda/kernels/sm90/launch.h"
#include "cuda/kernels/sm90_stream/launch.h"
#include "cuda/kernels/sm90_stream/select.h"
#include "cuda/ops/copy.h"
#include "cuda/ops/gather_lhs.h"
#include "cuda/ops/reduce_splits.h"
#include "cuda/ops/rms_norm.h"
#include "cuda/placement.h"
#include "cuda/select/select.h"
#include "cuda/select/tuned.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxDevices = 64;

// What is known of a device, read once. `ready`: the rest is there and does not change any more.
struct DeviceState {
  std::mutex mutex;
  std::atomic<bool> ready{false};
  Device device;
  std::shared_ptr<const TunedTable> tuned;
};

// JAXLOWBIT_MAX_COMPUTE_CAPABILITY=86 runs the kernels that a GPU of that capability would run, with its shared memory.
void Limit(Device& device) {
  const char* limit = std::getenv("JAXLOWBIT_MAX_COMPUTE_CAPABILITY");
  if (limit == nullptr) return;
  device.compute_capability = std::min(device.compute_capability, std::atoi(limit));
  if (device.compute_capability == 86 || device.compute_capability == 89) {
    device.shared_bytes_per_sm = std::min(device.shared_bytes_per_sm, kSm86SharedBytesPerSm);
  }
}

cudaError_t ReadDevice(int ordinal, Device& device) {
  int major = 0, minor = 0, clock_khz = 0, memory_khz = 0, memory_bits = 0;
  for (auto [attribute, value] :
       {std::pair{cudaDevAttrComputeCapabilityMajor, &major},
        std::pair{cudaDevAttrComputeCapabilityMinor, &minor},
        std::pair{cudaDevAttrMultiProcessorCount, &device.num_sms},
        std::pair{cudaDevAttrMaxSharedMemoryPerMultiprocessor, &device.shared_bytes_per_sm},
        std::pair{cudaDevAttrClockRate, &clock_khz},
        std::pair{cudaDevAttrMemoryClockRate, &memory_khz},
        std::pair{cudaDevAttrGlobalMemoryBusWidth, &memory_bits}}) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, ordinal);
    if (error != cudaSuccess) return error;
  }
  device.compute_capability = 10 * major + minor;
  device.clock_mhz = clock_khz / 1000;
  // Memory transfers twice in a clock.
  device.memory_gb_per_s = static_cast<int>(int64_t{2} * memory_khz * (memory_bits / 8) / 1000000);
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
cudaError_t Prepare(int ordinal, DeviceState& state) {
  Device& device = state.device;
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = ReadDevice(ordinal, device);
  if (error == cudaSuccess) error = FindTuned(ordinal, state.tuned);
  if (error == cudaSuccess) error = sm80::Prepare(device);
  if (error == cudaSuccess) error = PrepareReduceSplits();
  if (error == cudaSuccess) error = PrepareRmsNorm();
  if (error == cudaSuccess) error = PrepareCopy();
  if (error == cudaSuccess) error = PrepareGatherLhs(device);
  if (error == cudaSuccess && device.compute_capability == 90) {
    error = sm90_stream::Prepare(device);
    if (error == cudaSuccess) error = sm90::Prepare(device);
  }
  const cudaError_t restored = cudaSetDevice(current);
  return error == cudaSuccess ? restored : error;
}

DeviceState& StateOf(int ordinal) {
  static std::array<DeviceState, kMaxDevices> states;
  return states[ordinal];
}

// Makes one copy for all products that share an lhs that is not aligned, if there is room.
void AlignSharedLhs(std::vector<Operands>* products, Placement* placement) {
  const auto& [problem, buffers] = products->front();
  const void* shared = buffers.lhs;
  if (products->size() == 1 || IsAligned(shared)) return;
  const void* place = placement->Aligned(LhsExtent(problem, buffers));
  if (place == nullptr) return;
  for (Operands& product : *products) {
    if (product.buffers.lhs == shared) product.buffers.lhs = place;
  }
  products->front().problem.pdl = false;
}

// The rows of an unaligned lhs that half of the workspace holds, as a multiple of the largest tile; unlimited if that
// is none, or if a copy would not help.
int64_t RowsToCopy(const Operands& product, int64_t workspace_bytes) {
  const QuantizedMatmul& p = product.problem;
  constexpr int64_t kLargestTile = 256;
  const int64_t row_bytes = p.lhs_columns() * SizeOf(p.lhs);
  const int64_t rows = workspace_bytes / 2 / row_bytes / kLargestTile * kLargestTile;
  const bool copied = !IsAligned(product.buffers.lhs) && row_bytes % kAlignment == 0;
  return copied && p.permuted_parts == 0 && rows > 0 ? rows : std::numeric_limits<int64_t>::max();
}

// Batch elements, and rows of one of them, that a launch takes at most: grids and positions in them are 32-bit numbers.
struct LaunchLimits {
  int64_t batch, rows;
};

// In terms of the smallest tiles of all kernels.
LaunchLimits LimitsOf(const QuantizedMatmul& problem) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostGridY = 65535;
  const int64_t tiles_n = std::max(problem.strips(), problem.k_blocks());
  const int64_t rows = std::max<int64_t>(kMost / tiles_n, 1) * sm80::kMinBlockM;
  const int64_t tiles = CeilDiv(std::min(problem.m, rows), sm80::kMinBlockM) * tiles_n;
  return {std::clamp<int64_t>(kMost / std::max(tiles, problem.m), 1, kMostGridY),
          std::min(rows, kMost)};
}

// The launches of a product: one, or several if it is beyond the limits of a launch or if an unaligned lhs is copied
// piece by piece.
std::vector<Operands> LaunchesOf(const Operands& product, int64_t workspace_bytes) {
  const QuantizedMatmul& p = product.problem;
  const LaunchLimits limits = LimitsOf(p);
  const int64_t to_copy = RowsToCopy(product, workspace_bytes);
  const int64_t most_rows = std::min(limits.rows, to_copy);
  const int64_t most_batch =
      p.m > most_rows ? 1 : std::min(limits.batch, std::max<int64_t>(to_copy / p.m, 1));
  std::vector<Operands> launches;
  for (int64_t element = 0; element < p.batch; element += most_batch) {
    const Operands part =
        p.batch <= most_batch
            ? product
            : BatchPart(product, element, std::min(most_batch, p.batch - element));
    for (int64_t row = 0; row < p.m; row += most_rows) {
      launches.push_back(p.m <= most_rows ? part
                                          : RowPart(part, row, std::min(most_rows, p.m - row)));
      launches.back().problem.pdl = p.pdl && element == 0 && row == 0;
    }
  }
  return launches;
}

// How many products, from the first of `count` on, are one launch of qmm_sm90_stream, by which choice; 1 if the first
// is on its own.
size_t CountJoined(const Operands* products, size_t count, const DeviceState& state,
                   int64_t workspace_bytes, QuantizedMatmul* joined, Choice* choice) {
  size_t joining = 1;
  while (joining < count && joining < sm90_stream::kMaxProducts &&
         sm90_stream::MayJoin(products[0], products[joining])) {
    ++joining;
  }
  if (joining == 1) return 1;
  *joined = sm90_stream::Join(products, joining);
  if (!Supports(Kernel::kQmmSm90Stream, *joined, state.device)) return 1;
  *choice = Select(*joined, state.device, workspace_bytes, state.tuned.get());
  return choice->kernel == Kernel::kQmmSm90Stream ? joining : 1;
}

}  // namespace

cudaError_t PrepareKernels(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return cudaErrorInvalidDevice;
  DeviceState& state = StateOf(ordinal);
  if (state.ready.load(std::memory_order_acquire)) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.ready.load(std::memory_order_relaxed)) return cudaSuccess;
  state.device = {};
  const cudaError_t error = Prepare(ordinal, state);
  state.ready.store(error == cudaSuccess, std::memory_order_release);
  return error;
}

// A stream that is captured must not be asked, and drivers before 12.8 cannot be. Then the device is the current one,
// which XLA sets before every handler.
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
  Operands product = {problem, buffers};
  const bool gathers =
      choice.kernel == Kernel::kQmmSm90Stream && sm90_stream::Gathers(problem, device, choice);
  if (problem.permuted_parts > 0 && !gathers) {
    const cudaError_t error = LaunchGatherLhs(problem, buffers, device, stream);
    if (error != cudaSuccess) return error;
    product.problem.pdl = true;
    product.problem.lhs_aligned = IsAligned(buffers.gathered);
    product.buffers.lhs = buffers.gathered;
  }
  const auto& [p, b] = product;
  switch (choice.kernel) {
    case Kernel::kQmmSm80:
      return sm80::Launch(p, b, choice, device, stream);
    case Kernel::kQmmSm90Stream:
      return sm90_stream::Launch(p, &product, 1, choice, device, stream);
    case Kernel::kQmmSm90:
      return sm90::Launch(p, b, choice, device, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchProducts(std::vector<Operands> products, int64_t workspace_bytes, int ordinal,
                           cudaStream_t stream) {
  const auto is_empty = [](const Operands& product) {
    return product.problem.batch == 0 || product.problem.m == 0;
  };
  products.erase(std::remove_if(products.begin(), products.end(), is_empty), products.end());
  if (products.empty()) return cudaSuccess;
  Placement results(products[0].buffers.workspace, workspace_bytes, stream);
  results.RedirectResults(products.data(), products.size());
  AlignSharedLhs(&products, &results);
  const DeviceState& state = StateOf(ordinal);
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i < products.size() && error == cudaSuccess;) {
    Operands* first = &products[i];
    if (i > 0) first->problem.pdl = true;
    QuantizedMatmul joined;
    Choice choice;
    const size_t count =
        CountJoined(first, products.size() - i, state, results.bytes(), &joined, &choice);
    i += count;
    if (count > 1) {
      error = sm90_stream::Launch(joined, first, count, choice, state.device, stream);
      continue;
    }
    for (Operands& launch : LaunchesOf(*first, results.bytes())) {
      auto& [p, b] = launch;
      b.workspace = results.workspace();
      Placement operands(results.workspace(), results.bytes(), stream);
      operands.Align(&launch);
      if (operands.copied()) p.pdl = false;  // the previous kernel writes an operand
      const int64_t rows = p.batch * p.m * p.weights_per_element();
      const int64_t sums_bytes = std::min(operands.bytes(), MostSumsBytes(rows, p.out_columns()));
      choice = Select(p, state.device, sums_bytes, state.tuned.get());
      error = operands.Finish();
      if (error == cudaSuccess) error = LaunchChoice(p, b, choice, ordinal, stream);
      if (error != cudaSuccess) break;
    }
  }
  const cudaError_t finished = results.Finish();
  return error == cudaSuccess ? finished : error;
}

}  // namespace jaxlowbit
