// SPDX-License-Identifier: Apache-2.0

#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/jit/compiler.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/kernel_launch.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/sm80/launch.h"
#include "cuda/kernels/sm90/launch.h"
#include "cuda/kernels/sm90_stream/launch.h"
#include "cuda/kernels/sm90_stream/plan.h"
#include "cuda/ops/combine_choices.h"
#include "cuda/ops/copy.h"
#include "cuda/ops/gather_lhs.h"
#include "cuda/ops/group_choices.h"
#include "cuda/ops/quantize_rows.h"
#include "cuda/ops/reduce_splits.h"
#include "cuda/ops/rms_norm.h"
#include "cuda/ops/route_choices.h"
#include "cuda/plan.h"
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
    if (error == cudaSuccess) error = PrepareGroupChoices();
    if (error == cudaSuccess) error = PrepareCombineChoices();
    if (error == cudaSuccess) error = PrepareRouteChoices();
    if (error == cudaSuccess) error = sm90::Prepare(device);
  }
  const cudaError_t restored = cudaSetDevice(current);
  return error == cudaSuccess ? restored : error;
}

std::array<DeviceState, kMaxDevices> states;

class CopyStep final : public LoadedStep {
 public:
  explicit CopyStep(const PlannedStep& step) : from_(step.from), to_(step.to), bytes_(step.bytes) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    return LaunchCopy(PointerTo(from_, pointers), PointerTo(to_, pointers), bytes_, stream);
  }

 private:
  const Address from_, to_;
  const int64_t bytes_;
};

class GatherStep final : public LoadedStep {
 public:
  GatherStep(const PlannedStep& step, const Device& device)
      : problem_(step.problem), addresses_(step.products.front().buffers), device_(device) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    return LaunchGatherLhs(problem_, BuffersAt(addresses_, pointers), device_, stream);
  }

 private:
  const QuantizedMatmul problem_;
  const Addresses addresses_;
  const Device& device_;
};

class MultiplyStep final : public LoadedStep {
 public:
  MultiplyStep(const PlannedStep& step, std::unique_ptr<const KernelLaunch> kernel)
      : products_(step.products), kernel_(std::move(kernel)) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    std::array<Buffers, sm90_stream::kMaxProducts> buffers;
    for (size_t i = 0; i < products_.size(); ++i) {
      buffers[i] = BuffersAt(products_[i].buffers, pointers);
    }
    return kernel_->Launch(buffers.data(), stream);
  }

 private:
  const std::vector<PlannedProduct> products_;
  const std::unique_ptr<const KernelLaunch> kernel_;
};

LoadLaunch LoaderOf(Kernel kernel) {
  switch (kernel) {
    case Kernel::kQmmSm80:
      return sm80::Load;
    case Kernel::kQmmSm90Stream:
      return sm90_stream::Load;
    case Kernel::kQmmSm90:
      return sm90::Load;
  }
  return nullptr;
}

cudaError_t LoadStep(const PlannedStep& step, const Device& device,
                     std::unique_ptr<const LoadedStep>* loaded) {
  if (step.kind == PlannedStep::Kind::kCopy) *loaded = std::make_unique<CopyStep>(step);
  if (step.kind == PlannedStep::Kind::kGather) *loaded = std::make_unique<GatherStep>(step, device);
  if (step.kind != PlannedStep::Kind::kMultiply) return cudaSuccess;
  std::unique_ptr<const KernelLaunch> kernel;
  const cudaError_t error = LoaderOf(step.choice.kernel)(step, device, &kernel);
  if (error == cudaSuccess) *loaded = std::make_unique<MultiplyStep>(step, std::move(kernel));
  return error;
}

// The instances that the launches of a plan need.
std::vector<InstanceKey> InstancesOf(const std::vector<PlannedStep>& plan, const Device& device) {
  std::vector<InstanceKey> keys;
  for (const PlannedStep& step : plan) {
    if (step.kind != PlannedStep::Kind::kMultiply) continue;
    keys.push_back(KeyOf(step.problem, step.choice, device));
  }
  return keys;
}

// A product whose buffers are numbered in the order of their fields, with their pointers.
struct Numbered {
  explicit Numbered(const Operands& operands) : product{operands.problem, {}} {
    product.buffers.codebook = operands.buffers.codebook;
#define JAXLOWBIT_BUFFER(type, name) Add(operands.buffers.name, &product.buffers.name);
#include "cuda/buffers.def"
  }

  void Add(const void* data, Address* address) {
    if (data != nullptr) *address = {static_cast<int>(pointers.size()), 0};
    pointers.push_back(const_cast<void*>(data));
  }

  PlannedProduct product;
  std::vector<void*> pointers;
};

cudaError_t LoadAndRun(const std::vector<PlannedStep>& plan, void* const* pointers,
                       const Device& device, cudaStream_t stream) {
  std::vector<std::unique_ptr<const LoadedStep>> steps;
  cudaError_t error = LoadSteps(plan, device, &steps);
  for (size_t i = 0; i < steps.size() && error == cudaSuccess; ++i) {
    error = steps[i]->Run(pointers, stream);
  }
  return error;
}

}  // namespace

cudaError_t PrepareKernels(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return cudaErrorInvalidDevice;
  DeviceState& state = states[ordinal];
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
cudaError_t FindTarget(cudaStream_t stream, bool prepares, int* ordinal, Target* target) {
  *ordinal = -1;
  cudaStreamCaptureStatus capture;
  const bool found = cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
                     capture == cudaStreamCaptureStatusNone &&
                     cudaStreamGetDevice(stream, ordinal) == cudaSuccess;
  if (!found) {
    cudaGetLastError();
    const cudaError_t error = cudaGetDevice(ordinal);
    if (error != cudaSuccess) return error;
  }
  if (*ordinal < 0 || *ordinal >= kMaxDevices) return cudaErrorInvalidDevice;
  const DeviceState& state = states[*ordinal];
  if (prepares && !state.ready.load(std::memory_order_acquire)) {
    const cudaError_t error = PrepareKernels(*ordinal);
    if (error != cudaSuccess) return error;
  }
  *target = {&state.device, state.tuned.get()};
  return cudaSuccess;
}

const Device& DeviceInfo(int ordinal) { return states[ordinal].device; }

cudaError_t LoadSteps(const std::vector<PlannedStep>& plan, const Device& device,
                      std::vector<std::unique_ptr<const LoadedStep>>* steps) {
  for (const InstanceKey& key : InstancesOf(plan, device)) {  // compiled concurrently
    StartCompiling(key, device.architecture);
  }
  for (const PlannedStep& step : plan) {
    std::unique_ptr<const LoadedStep> loaded;
    const cudaError_t error = LoadStep(step, device, &loaded);
    if (error != cudaSuccess) return error;
    steps->push_back(std::move(loaded));
  }
  return cudaSuccess;
}

void StartCompiling(const std::function<std::vector<PlannedStep>(const Target&)>& plan) {
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
  const std::vector<PlannedStep> steps = plan({&guess.device, guess.tuned.get()});
  for (const InstanceKey& key : InstancesOf(steps, guess.device)) {
    StartCompiling(key, guess.device.architecture);
  }
}

cudaError_t LaunchProduct(const Operands& product, int64_t workspace_bytes, int ordinal,
                          cudaStream_t stream) {
  const Numbered numbered(product);
  const DeviceState& state = states[ordinal];
  Ways ways(numbered.pointers.data());
  std::vector<PlannedStep> plan;
  const Room room = {numbered.product.buffers.workspace, workspace_bytes};
  const std::string error =
      PlanProducts({numbered.product}, {&state.device, state.tuned.get()}, room, &ways, &plan);
  if (!error.empty()) return cudaErrorInvalidValue;
  return LoadAndRun(plan, numbered.pointers.data(), state.device, stream);
}

cudaError_t LaunchChoice(const QuantizedMatmul& problem, const Buffers& buffers,
                         const Choice& choice, int ordinal, cudaStream_t stream) {
  const Numbered numbered({problem, buffers});
  const Device& device = DeviceInfo(ordinal);
  Ways ways(numbered.pointers.data());
  return LoadAndRun(PlanChoice(numbered.product, choice, device, &ways), numbered.pointers.data(),
                    device, stream);
}

cudaError_t LoadChoices(const QuantizedMatmul& problem, const std::vector<Choice>& choices,
                        int ordinal) {
  const Device& device = DeviceInfo(ordinal);
  std::vector<InstanceKey> keys;
  for (const Choice& choice : choices) {
    Ways typical(nullptr);
    for (const InstanceKey& key :
         InstancesOf(PlanChoice({problem, {}}, choice, device, &typical), device)) {
      StartCompiling(key, device.architecture);  // concurrently
      keys.push_back(key);
    }
  }
  for (const InstanceKey& key : keys) {
    const void* function = nullptr;
    const cudaError_t error = KernelOn(device, key, &function);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxlowbit
