// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/loaded.h"

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "cuda/jit/compiler.h"
#include "cuda/jit/kernels.h"
#include "cuda/kernels/sm80/instances.h"
#include "cuda/kernels/sm80/launch.h"
#include "cuda/kernels/sm90/instances.h"
#include "cuda/kernels/sm90/launch.h"
#include "cuda/kernels/sm90_stream/instances.h"
#include "cuda/kernels/sm90_stream/launch.h"

namespace jaxlowbit {
namespace {

thread_local std::string load_error;

struct Loaded {
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, const void*> functions;  // by device and key
  LoadCounts counts;
  std::mutex loading;
  std::unordered_map<uint64_t, const void*> libraries;  // compiled kernels, by architecture and key
};

// Never destroyed: threads may still launch while the process exits.
Loaded& GetLoaded() {
  static Loaded& loaded = *new Loaded;
  return loaded;
}

uint64_t NumberOf(int place, const InstanceKey& key) {
  return static_cast<uint64_t>(place) << 32 | key.number();
}

// The ahead-of-time instance, or null.
const void* Find(const InstanceKey& key) {
  if (!IsPrebuiltFormat(key)) return nullptr;
  switch (key.family) {
    case Family::kSm80:
      return reinterpret_cast<const void*>(sm80::Find(key));
    case Family::kSm80Transposed:
      break;
    case Family::kSm90Stream:
      return reinterpret_cast<const void*>(sm90_stream::Find(key));
    case Family::kSm90:
      return reinterpret_cast<const void*>(sm90::Find(key));
  }
  return nullptr;
}

// Loads the kernel on the current device and allows the shared memory that its launches may use.
cudaError_t Load(const InstanceKey& key, const void* function) {
  switch (key.family) {
    case Family::kSm80:
    case Family::kSm80Transposed:
      return sm80::Load(function);
    case Family::kSm90Stream:
      return sm90_stream::Load(function);
    case Family::kSm90:
      return sm90::Load(key, function);
  }
  return cudaErrorInvalidValue;
}

jit::Result Compile(const InstanceKey& key, int architecture) {
  const jit::KernelSource& source = jit::kKernels[static_cast<int>(key.family)];
  return jit::Start({source.header, NameOf(key), source.params, source.params_bytes},
                    jit::ArchitectureName(architecture));
}

// Loads a cubin with one kernel. The cudaLibrary_t is independent of devices and is never unloaded.
cudaError_t KernelOf(const std::string& cubin, const void** function) {
  cudaLibrary_t library;
  cudaError_t error =
      cudaLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error != cudaSuccess) return error;
  unsigned count = 0;
  cudaKernel_t kernel = nullptr;
  error = cudaLibraryGetKernelCount(&count, library);
  if (error == cudaSuccess && count != 1) error = cudaErrorInvalidKernelImage;
  if (error == cudaSuccess) error = cudaLibraryEnumerateKernels(&kernel, 1, library);
  if (error == cudaSuccess) {
    *function = reinterpret_cast<const void*>(
        kernel);  // the runtime accepts a cudaKernel_t as a function pointer
  } else {
    cudaLibraryUnload(library);
  }
  return error;
}

// Scope guard: sets the current device, and allows this thread to load kernels while a stream is being captured.
class LoadingOn {
 public:
  explicit LoadingOn(int device) {
    error_ = cudaGetDevice(&device_);
    if (error_ == cudaSuccess && device_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
    if (error_ == cudaSuccess) error_ = cudaThreadExchangeStreamCaptureMode(&mode_);
    exchanged_ = error_ == cudaSuccess;
  }
  LoadingOn(const LoadingOn&) = delete;
  LoadingOn& operator=(const LoadingOn&) = delete;

  ~LoadingOn() {
    if (exchanged_) cudaThreadExchangeStreamCaptureMode(&mode_);
    if (changed_) cudaSetDevice(device_);
  }

  cudaError_t error() const { return error_; }

 private:
  int device_ = 0;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool exchanged_ = false, changed_ = false;
  cudaError_t error_;
};

cudaError_t LoadOn(const Device& device, const InstanceKey& key, const void** function) {
  Loaded& loaded = GetLoaded();
  const LoadingOn scope(device.ordinal);
  if (scope.error() != cudaSuccess) return scope.error();
  load_error = "the kernel is " + NameOf(key);
  const void* found = Find(key);
  const bool ahead_of_time = found != nullptr;
  jit::Result compiled;
  if (!ahead_of_time) {
    compiled = Compile(key, device.architecture);
    if (!compiled.get().error.empty()) {
      load_error += ", which could not be compiled: " + compiled.get().error;
      return cudaErrorNoKernelImageForDevice;
    }
  }
  const std::lock_guard<std::mutex> lock(loaded.loading);
  if (!ahead_of_time) {
    const void*& kernel = loaded.libraries[NumberOf(device.architecture, key)];
    if (kernel == nullptr) {
      const cudaError_t error = KernelOf(compiled.get().cubin, &kernel);
      if (error != cudaSuccess) return error;
    }
    found = kernel;
  }
  const cudaError_t error = Load(key, found);
  if (error != cudaSuccess) return error;
  load_error.clear();
  *function = found;
  const std::unique_lock<std::shared_mutex> publishing(loaded.mutex);
  if (loaded.functions.emplace(NumberOf(device.ordinal, key), found).second) {
    ++(ahead_of_time           ? loaded.counts.ahead_of_time
       : compiled.get().cached ? loaded.counts.cached
                               : loaded.counts.compiled);
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t KernelOn(const Device& device, const InstanceKey& key, const void** function) {
  Loaded& loaded = GetLoaded();
  {
    const std::shared_lock<std::shared_mutex> lock(loaded.mutex);
    const auto found = loaded.functions.find(NumberOf(device.ordinal, key));
    if (found != loaded.functions.end()) {
      *function = found->second;
      return cudaSuccess;
    }
  }
  return LoadOn(device, key, function);
}

void StartCompiling(const InstanceKey& key, int architecture) {
  if (!IsAheadOfTime(key)) Compile(key, architecture);
}

std::string PopLoadError() { return std::exchange(load_error, {}); }

bool IsAheadOfTime(const InstanceKey& key) { return Find(key) != nullptr; }

LoadCounts CountLoaded() {
  Loaded& loaded = GetLoaded();
  const std::shared_lock<std::shared_mutex> lock(loaded.mutex);
  return loaded.counts;
}

}  // namespace jaxlowbit
