// SPDX-License-Identifier: Apache-2.0
//
// Instances of kernels that are compiled where they run: by NVRTC, from sources that this library carries, with a
// cache of what was compiled (cache.h).
#pragma once

#include <cstddef>
#include <future>
#include <string>
#include <vector>

namespace jaxlowbit::jit {

// An instance of a kernel template.
struct Instance {
  std::string header;       // defines the kernel
  std::string expression;   // names the instance, as C++ does
  std::string params;       // the type of its one parameter
  size_t params_bytes = 0;  // sizeof(params) on the host; compiling fails if the device's differs
};

struct Compiled {
  std::string cubin;  // of one kernel; empty if there is an error
  std::string error;
  bool cached = false;  // it was found in the cache
  double seconds = 0;   // that it took
};

using Result = std::shared_future<Compiled>;

// What there is to compile with.
struct Toolchain {
  std::string error;  // why nothing can be compiled, or empty
  std::string compiler, path;
  std::string cache;  // the folder, or empty
};

// Where to look for NVRTC before the system does. Has no effect once a compiler was needed.
void SetNvrtcPaths(std::vector<std::string> paths);

// Loads NVRTC. JAXLOWBIT_COMPILE=0 turns compiling off.
Toolchain FindToolchain();

// The architecture that a device of a compute capability, such as 90, has its instances compiled for.
std::string ArchitectureName(int compute_capability);

// The cubin for an architecture, such as "90a": from the cache, or compiled by one of a few threads and kept there.
// All that ask for one instance share its result. Returns at once.
Result Start(const Instance& instance, const std::string& architecture);

// Drops what has not begun and waits for the rest. A process calls this before it runs exit handlers: NVRTC takes down
// in them what its threads use.
void Finish();

}  // namespace jaxlowbit::jit
