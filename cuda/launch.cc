// SPDX-License-Identifier: Apache-2.0

#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/extents.h"
#include "cuda/jit/compiler.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/sm80/launch.h"
#include "cuda/kernels/sm80/plan.h"
#include "cuda/kernels/sm90/launch.h"
#include "cuda/kernels/sm90_stream/launch.h"
#include "cuda/kernels/sm90_stream/select.h"
#include "cuda/ops/copy.h"
#include "cuda/ops/gather_lhs.h"
#include "cuda/ops/quantize_rows.h"
#include "cuda/ops/reduce_splits.h"
#include "cuda/ops/rms_norm.h"
#include "cuda/placement.h"
#include "cuda/select/cache.h"
#include "cuda/select/select.h"
#include "cuda/select/tuned.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxDevices = 64;

// Cached device properties, read once. `ready`: the other members are set and no longer change.
struct DeviceState {
  std::mutex mutex;
  std::atomic<bool> ready{false};
  Device device;
  std::shared_ptr<const TunedTable> tuned;
};

// JAXLOWBIT_MAX_COMPUTE_CAPABILITY=86 selects kernels as for a GPU of that capability, with its shared memory.
void Limit(Device& device) {
  const char* limit = std::getenv("JAXLOWBIT_MAX_COMPUTE_CAPABILITY");
  if (limit == nullptr) return;
  device.compute_capability = std::min(device.compute_capability, std::atoi(limit));
  if (device.compute_capability == 86 || device.compute_capability == 89) {
    device.shared_bytes_per_sm = std::min(device.shared_bytes_per_sm, kSm86SharedBytesPerSm);
  }
}

// Reads the clock rates of a device; rates that the driver does not report stay 0.
void ReadRates(int ordinal, Device& device) {
  int clock_khz = 0, memory_khz = 0, memory_bits = 0;
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, ordinal);
  cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, ordinal);
  cudaDeviceGetAttribute(&memory_bits, cudaDevAttrGlobalMemoryBusWidth, ordinal);
  cudaGetLastError();
  device.clock_mhz = clock_khz / 1000;
  // Double data rate.
  device.memory_gb_per_s = static_cast<int>(int64_t{2} * memory_khz * (memory_bits / 8) / 1000000);
}

bool HasCompiler() {
  static const bool has_compiler = jit::FindToolchain().error.empty();
  return has_compiler;
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
  device.compiles = HasCompiler;
  device.ordinal = ordinal;
  device.architecture = device.compute_capability = 10 * major + minor;
  ReadRates(ordinal, device);
  Limit(device);
  return cudaSuccess;
}

cudaError_t FindTuned(int ordinal, std::shared_ptr<const TunedTable>& tuned) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error == cudaSuccess) tuned = TunedFor(properties.name);
  return error;
}

// Loads everything but the matmul instances, which are loaded on first use (kernels/loaded.h).
cudaError_t Prepare(int ordinal, DeviceState& state) {
  Device& device = state.device;
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = ReadDevice(ordinal, device);
  if (error == cudaSuccess) error = FindTuned(ordinal, state.tuned);
  if (error == cudaSuccess) error = PrepareReduceSplits();
  if (error == cudaSuccess) error = PrepareRmsNorm();
  if (error == cudaSuccess) error = PrepareCopy();
  if (error == cudaSuccess) error = PrepareGatherLhs(device);
  if (device.compute_capability == 90) {
    if (error == cudaSuccess) error = PrepareQuantizeRows();
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

// Rows of an unaligned lhs that fit half of the workspace, as a multiple of the largest tile; unlimited if that is 0 or
// if a copy would not help.
int64_t RowsToCopy(const Operands& product, int64_t workspace_bytes) {
  const QuantizedMatmul& p = product.problem;
  constexpr int64_t kLargestTile = 256;
  const int64_t row_bytes = p.lhs_columns() * SizeOf(p.lhs);
  const int64_t rows = workspace_bytes / 2 / row_bytes / kLargestTile * kLargestTile;
  const bool copied = !IsAligned(product.buffers.lhs) && row_bytes % kAlignment == 0;
  return copied && p.permuted_parts == 0 && rows > 0 ? rows : std::numeric_limits<int64_t>::max();
}

// Maximum batch elements and rows of one of them per launch: grids and positions in them are 32-bit numbers.
struct LaunchLimits {
  int64_t batch, rows;
};

// In units of the smallest tile of any kernel.
LaunchLimits LimitsOf(const QuantizedMatmul& problem) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMaxGridY = 65535;
  const int64_t tiles_n = std::max(problem.strips(), problem.k_blocks());
  const int64_t rows = std::max<int64_t>(kLimit / tiles_n, 1) * sm80::kMinBlockM;
  const int64_t tiles = CeilDiv(std::min(problem.m, rows), sm80::kMinBlockM) * tiles_n;
  return {std::clamp<int64_t>(kLimit / std::max(tiles, problem.m), 1, kMaxGridY),
          std::min(rows, kLimit)};
}

// The launches of a product: one, or several if it exceeds the limits of a launch or if an unaligned lhs is copied in
// pieces.
std::vector<Operands> LaunchesOf(const Operands& product, int64_t workspace_bytes) {
  const QuantizedMatmul& p = product.problem;
  if (p.is_ragged()) return {product};  // its tiles are blocks of rows
  const LaunchLimits limits = LimitsOf(p);
  const int64_t to_copy = RowsToCopy(product, workspace_bytes);
  const int64_t max_rows = std::min(limits.rows, to_copy);
  const int64_t max_batch =
      p.m > max_rows ? 1 : std::min(limits.batch, std::max<int64_t>(to_copy / p.m, 1));
  std::vector<Operands> launches;
  for (int64_t element = 0; element < p.batch; element += max_batch) {
    const Operands part = p.batch <= max_batch
                              ? product
                              : BatchPart(product, element, std::min(max_batch, p.batch - element));
    for (int64_t row = 0; row < p.m; row += max_rows) {
      launches.push_back(p.m <= max_rows ? part
                                         : RowPart(part, row, std::min(max_rows, p.m - row)));
      launches.back().problem.pdl = p.pdl && element == 0 && row == 0;
    }
  }
  return launches;
}

// Returns how many of the first `count` products share one launch of qmm_sm90_stream, and sets `choice` to that
// launch's; 1 if the first product is launched separately.
size_t CountJoined(const Operands* products, size_t count, const DeviceState& state,
                   int64_t workspace_bytes, QuantizedMatmul* joined, Choice* choice) {
  size_t joining = 1;
  while (joining < count && joining < sm90_stream::kMaxProducts &&
         sm90_stream::MayJoin(products[0], products[joining])) {
    ++joining;
  }
  if (joining == 1) return 1;
  *joined = sm90_stream::Join(products, joining);
  if (!Supports(*joined, state.device)) return 1;
  *choice = SelectCached(*joined, state.device, workspace_bytes, state.tuned.get());
  return choice->kernel == Kernel::kQmmSm90Stream ? joining : 1;
}

// Whether a separate kernel gathers a permuted lhs before the product.
bool GathersBefore(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  const bool gathers =
      choice.kernel == Kernel::kQmmSm90Stream &&
      sm90_stream::LhsPathOf(problem, device, choice) == sm90_stream::LhsPath::kGathers;
  return problem.permuted_parts > 0 && !gathers;
}

// The product that reads lhs as gathered by that kernel.
Operands WithGatheredLhs(Operands product) {
  product.problem.permuted_parts = 0;
  product.problem.pdl = true;
  product.problem.lhs_aligned = IsAligned(product.buffers.gathered);
  product.buffers.lhs = product.buffers.gathered;
  return product;
}

// The instance that LaunchChoice launches.
InstanceKey KeyOfLaunch(const Operands& product, const Device& device, const Choice& choice) {
  const bool gathers = GathersBefore(product.problem, device, choice);
  return KeyOf(gathers ? WithGatheredLhs(product).problem : product.problem, choice, device);
}

// Action that launches.
struct Launches {
  int ordinal;
  cudaStream_t stream;

  static constexpr bool kCopies = true;
  cudaError_t Joined(const QuantizedMatmul& joined, const Operands* products, size_t count,
                     const Choice& choice) const {
    return sm90_stream::Launch(joined, products, count, choice, DeviceInfo(ordinal), stream);
  }
  cudaError_t One(const Operands& product, const Choice& choice) const {
    return LaunchChoice(product.problem, product.buffers, choice, ordinal, stream);
  }
};

// Action that collects instance keys instead.
struct Collects {
  std::vector<InstanceKey>* keys;
  const Device& device;

  static constexpr bool kCopies = false;
  static constexpr cudaStream_t stream = nullptr;
  cudaError_t Joined(const QuantizedMatmul& joined, const Operands*, size_t,
                     const Choice& choice) const {
    keys->push_back(KeyOf(joined, choice, device));
    return cudaSuccess;
  }
  cudaError_t One(const Operands& product, const Choice& choice) const {
    keys->push_back(KeyOfLaunch(product, device, choice));
    return cudaSuccess;
  }
};

template <typename Action>
cudaError_t ForEachLaunch(std::vector<Operands> products, int64_t workspace_bytes,
                          const DeviceState& state, const Action& action) {
  const auto is_empty = [](const Operands& product) {
    return product.problem.batch == 0 || product.problem.m == 0;
  };
  products.erase(std::remove_if(products.begin(), products.end(), is_empty), products.end());
  if (products.empty()) return cudaSuccess;
  Placement results(products[0].buffers.workspace, workspace_bytes, action.stream, Action::kCopies);
  results.RedirectResults(products.data(), products.size());
  AlignSharedLhs(&products, &results);
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
      error = action.Joined(joined, first, count, choice);
      continue;
    }
    for (Operands& launch : LaunchesOf(*first, results.bytes())) {
      auto& [p, b] = launch;
      b.workspace = results.workspace();
      Placement operands(results.workspace(), results.bytes(), action.stream, Action::kCopies);
      operands.Align(&launch);
      if (operands.copied()) p.pdl = false;  // the previous kernel writes an operand
      // The only kernel for two-level scales needs aligned operands; the workspace has no room to align these.
      if (p.scale == ElementType::kSuper && !Supports(p, state.device)) {
        return cudaErrorMisalignedAddress;
      }
      const int64_t rows = p.batch * p.m * p.weights_per_element();
      const int64_t sums_bytes =
          std::min(operands.bytes(), MaxPartialSumsBytes(rows, p.out_columns()));
      choice = SelectCached(p, state.device, sums_bytes, state.tuned.get());
      error = operands.Finish();
      if (error == cudaSuccess) error = action.One(launch, choice);
      if (error != cudaSuccess) break;
    }
  }
  const cudaError_t finished = results.Finish();
  return error == cudaSuccess ? finished : error;
}

// Loads instances; those missing from the build are compiled concurrently.
cudaError_t LoadAll(const std::vector<InstanceKey>& keys, const Device& device) {
  for (const InstanceKey& key : keys) StartCompiling(key, device.architecture);
  for (const InstanceKey& key : keys) {
    const void* function = nullptr;
    const cudaError_t error = KernelOn(device, key, &function);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Typical operands: aligned, without overlap.
std::vector<Operands> WithTypicalBuffers(const std::vector<QuantizedMatmul>& problems) {
  std::vector<Operands> products;
  for (const QuantizedMatmul& problem : problems) {
    products.push_back({problem, {}});
    products.back().buffers.out = reinterpret_cast<void*>(products.size() << 48);
  }
  return products;
}

// Nonzero hash of everything that selects the instances of a call. If two calls collide, the instances of the second
// are loaded at launch.
uint64_t NumberOf(const std::vector<QuantizedMatmul>& problems, int64_t workspace_bytes,
                  int ordinal) {
  uint64_t number = 0xcbf29ce484222325;
  const auto mix = [&](int64_t value) {
    number = (number ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15;
    number ^= number >> 29;
  };
  mix(ordinal);
  mix(workspace_bytes);
  for (const QuantizedMatmul& p : problems) {
    VisitFields(p, [&](const char*, auto field) { mix(static_cast<int64_t>(field)); });
  }
  return number | 1;
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

// Querying a capturing stream is not allowed, and drivers before 12.8 have no query. The current device is used then,
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
  if (GathersBefore(problem, device, choice)) {
    const cudaError_t error = LaunchGatherLhs(problem, buffers, device, stream);
    if (error != cudaSuccess) return error;
    product = WithGatheredLhs(product);
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

cudaError_t LoadChoices(const QuantizedMatmul& problem, const std::vector<Choice>& choices,
                        int ordinal) {
  const Device& device = DeviceInfo(ordinal);
  std::vector<InstanceKey> keys;
  for (const Choice& choice : choices) keys.push_back(KeyOfLaunch({problem, {}}, device, choice));
  return LoadAll(keys, device);
}

cudaError_t LaunchProducts(std::vector<Operands> products, int64_t workspace_bytes, int ordinal,
                           cudaStream_t stream) {
  return ForEachLaunch(std::move(products), workspace_bytes, StateOf(ordinal),
                       Launches{ordinal, stream});
}

cudaError_t LoadProducts(const std::vector<QuantizedMatmul>& problems, int64_t workspace_bytes,
                         int ordinal) {
  thread_local std::array<uint64_t, 1024> loaded =
      {};  // hashes of calls, indexed by their remainder
  const uint64_t number = NumberOf(problems, workspace_bytes, ordinal);
  uint64_t& known = loaded[number / 2 % loaded.size()];
  if (known == number) return cudaSuccess;
  const DeviceState& state = StateOf(ordinal);
  std::vector<InstanceKey> keys;
  cudaError_t error = ForEachLaunch(WithTypicalBuffers(problems), workspace_bytes, state,
                                    Collects{&keys, state.device});
  if (error == cudaSuccess) error = LoadAll(keys, state.device);
  if (error == cudaSuccess) known = number;
  return error;
}

void StartCompiling(const std::vector<QuantizedMatmul>& problems) {
  // Properties that need no context on the device, since the program may run on others.
  int ordinal = 0;
  DeviceState guess;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error == cudaSuccess) error = ReadDevice(ordinal, guess.device);
  if (error == cudaSuccess) error = FindTuned(ordinal, guess.tuned);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  AssumeClusters(guess.device);
  for (const QuantizedMatmul& problem : problems) {
    if (!Supports(problem, guess.device)) return;
  }
  std::vector<InstanceKey> keys;
  ForEachLaunch(WithTypicalBuffers(problems), kMaxWorkspaceBytes, guess,
                Collects{&keys, guess.device});
  for (const InstanceKey& key : keys) StartCompiling(key, guess.device.architecture);
}

}  // namespace jaxlowbit
