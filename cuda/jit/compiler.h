// SPDX-License-Identifier: Apache-2.0
//
// JIT compiler of kernel instances: NVRTC, sources embedded in this library, and a cache on disk (cache.h).
#pragma once

#include <cstddef>
#include <future>
#include <string>
#include <vector>

namespace jaxlowbit::jit {

// An instance of a kernel template.
struct Instance {
  std::string header;       // defines the kernel
  std::string expression;   // C++ name of the instance
  std::string params;       // type of its only parameter
  size_t params_bytes = 0;  // sizeof(params) on the host; compiling fails if the device's differs
};

struct Compiled {
  std::string cubin;  // of one kernel; empty if there is an error
  std::string error;
  bool cached = false;  // read from the cache on disk
  double seconds = 0;   // time to read or compile
};

using Result = std::shared_future<Compiled>;

// The available compiler and cache.
struct Toolchain {
  std::string error;  // reason why there is no compiler, or empty
  std::string compiler, path;
  std::string cache;  // the folder, or empty
};

// Sets libraries to try before the system's NVRTC. No effect after the first use of the compiler.
void SetNvrtcPaths(std::vector<std::string> paths);

// Loads NVRTC on first use. JAXLOWBIT_COMPILE=0 disables the compiler.
Toolchain FindToolchain();

// The architecture to compile for on a device of a compute capability: 90 -> "90a".
std::string ArchitectureName(int compute_capability);

// Reads the cubin for an architecture, such as "90a", from the cache, or compiles and caches it, on a thread pool.
// Returns immediately. Requests for one instance share its result.
Result Start(const Instance& instance, const std::string& architecture);

// Drops queued compilations and waits for running ones. Must be called before exit handlers run, since NVRTC's handlers
// destroy state that its threads use.
void Finish();

}  // namespace jaxlowbit::jit
