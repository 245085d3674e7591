// SPDX-License-Identifier: Apache-2.0

#include "cuda/jit/compiler.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "cuda/jit/cache.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/jit/sources.h"

namespace jaxlowbit::jit {
namespace {

// Thread pool whose threads exit when the queue is empty.
class Workers {
 public:
  void Run(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    process_ = getpid();
    tasks_.push_back(std::move(task));
    if (running_ == std::max(1u, std::thread::hardware_concurrency())) return;
    ++running_;
    std::thread([this] { Work(); }).detach();
  }

  // Drops queued tasks and waits for running ones. A forked process inherits the counts but not the threads.
  void Finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (process_ != getpid()) return;
    tasks_.clear();
    idle_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!tasks_.empty()) {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
    if (--running_ == 0) idle_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable idle_;
  pid_t process_ = 0;
  std::deque<std::function<void()>> tasks_;
  unsigned running_ = 0;
};

struct State {
  std::mutex mutex;
  std::vector<std::string> paths;
  bool looked = false;  // searched for NVRTC
  const Nvrtc* nvrtc = nullptr;
  std::string error;
  std::map<std::string, Result> results;  // by key
  Workers workers;
};

// Never destroyed: threads may still compile while the process exits.
State& GetState() {
  static State& state = *new State;
  return state;
}

// Returns the compiler, or null and sets state.error. The caller holds the lock.
const Nvrtc* FindNvrtc(State& state) {
  if (state.looked) return state.nvrtc;
  state.looked = true;
  const char* wanted = std::getenv("JAXLOWBIT_COMPILE");
  if (wanted != nullptr && std::string_view(wanted) == "0") {
    state.error = "JAXLOWBIT_COMPILE=0 turns compiling off";
  } else {
    state.nvrtc = Nvrtc::Load(state.paths, &state.error);
  }
  return state.nvrtc;
}

std::vector<std::string> OptionsFor(const std::string& architecture) {
  return {"--gpu-architecture=sm_" + architecture,
          "--std=c++17",
          "--device-as-default-execution-space",  // for constexpr functions without __device__
          "--define-macro=JAXLOWBIT_TENSOR_MAP_ALIGNMENT=" + std::to_string(alignof(CUtensorMap)),
#if defined(JAXLOWBIT_SANITIZER)
          "--define-macro=JAXLOWBIT_SANITIZER",
#endif
          "--minimal"};
}

std::string SourceOf(const Instance& instance) {
  return "#include \"" + instance.header + "\"\nstatic_assert(sizeof(" + instance.params +
         ") == " + std::to_string(instance.params_bytes) +
         ", \"the host has parameters of another size\");\n";
}

// Cache key: everything that the cubin depends on.
std::string KeyOf(const Instance& instance, const std::string& architecture, const Nvrtc& nvrtc) {
  std::string key = std::string(kSourcesDigest) + "\n" + nvrtc.identity() + "\n";
  for (const std::string& option : OptionsFor(architecture)) key += option + "\n";
  return key + SourceOf(instance) + instance.expression;
}

Compiled CompileOrRead(const Instance& instance, const std::string& architecture,
                       const Nvrtc& nvrtc, const std::string& key) {
  const auto begin = std::chrono::steady_clock::now();
  const Cache cache(Cache::DefaultFolder());
  Compiled compiled;
  compiled.cubin = cache.Read(key);
  compiled.cached = !compiled.cubin.empty();
  if (!compiled.cached) {
    Program program = {SourceOf(instance), instance.expression, {}, OptionsFor(architecture)};
    for (size_t i = 0; i < kNumSources; ++i) {
      program.headers.emplace_back(kSources[i].name, kSources[i].text);
    }
    compiled.cubin = nvrtc.Compile(program, &compiled.error);
    // Write errors are ignored: the next process compiles again.
    if (compiled.error.empty()) cache.Write(key, compiled.cubin);
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  compiled.seconds = spent.count();
  return compiled;
}

Result Failed(std::string error) {
  std::promise<Compiled> promise;
  promise.set_value({"", std::move(error)});
  return promise.get_future().share();
}

}  // namespace

void SetNvrtcPaths(std::vector<std::string> paths) {
  State& state = GetState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.paths = std::move(paths);
}

void Finish() { GetState().workers.Finish(); }

Toolchain FindToolchain() {
  State& state = GetState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const Nvrtc* nvrtc = FindNvrtc(state);
  Toolchain found;
  found.error = state.error;
  found.cache = Cache::DefaultFolder();
  if (nvrtc != nullptr) found.compiler = nvrtc->identity(), found.path = nvrtc->path();
  return found;
}

// wgmma and setmaxnreg exist only in sm_90a.
std::string ArchitectureName(int compute_capability) {
  return std::to_string(compute_capability) + (compute_capability == 90 ? "a" : "");
}

Result Start(const Instance& instance, const std::string& architecture) {
  State& state = GetState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const Nvrtc* nvrtc = FindNvrtc(state);
  if (nvrtc == nullptr) return Failed(state.error);
  const std::string key = KeyOf(instance, architecture, *nvrtc);
  const auto [entry, is_new] = state.results.try_emplace(key);
  if (is_new) {
    auto task = std::make_shared<std::packaged_task<Compiled()>>(
        [=] { return CompileOrRead(instance, architecture, *nvrtc, key); });
    entry->second = task->get_future().share();
    state.workers.Run([task] { (*task)(); });
  }
  return entry->second;
}

}  // namespace jaxlowbit::jit
