// SPDX-License-Identifier: Apache-2.0
//
// NVRTC, loaded on first use. Needs neither a GPU nor a driver. https://docs.nvidia.com/cuda/nvrtc/
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace jaxlowbit::jit {

// Input of a compilation: one kernel.
struct Program {
  std::string source;
  std::string expression;                                    // C++ name of the kernel
  std::vector<std::pair<const char*, const char*>> headers;  // names and texts
  std::vector<std::string> options;
};

class Nvrtc {
 public:
  // Loads the first usable library of `paths`, else the system's. Returns null and sets `error` if none has version
  // 13.3 or newer.
  static const Nvrtc* Load(const std::vector<std::string>& paths, std::string* error);

  int version() const { return version_; }  // 100 * major + minor
  const std::string& path() const { return path_; }
  // Identifies the build: version and file size.
  const std::string& identity() const { return identity_; }

  // Returns the cubin, or an empty string and sets `error`. Thread-safe.
  std::string Compile(const Program& program, std::string* error) const;

 private:
  using Handle = struct NvrtcProgram*;

  bool Open(const std::string& path, std::string* error);
  bool FindFunctions(void* library);

  // The signatures have not changed since CUDA 11.
  int (*get_version_)(int*, int*) = nullptr;
  const char* (*get_error_string_)(int) = nullptr;
  int (*create_)(Handle*, const char*, const char*, int, const char* const*,
                 const char* const*) = nullptr;
  int (*destroy_)(Handle*) = nullptr;
  int (*add_expression_)(Handle, const char*) = nullptr;
  int (*compile_)(Handle, int, const char* const*) = nullptr;
  int (*get_log_size_)(Handle, size_t*) = nullptr;
  int (*get_log_)(Handle, char*) = nullptr;
  int (*get_cubin_size_)(Handle, size_t*) = nullptr;
  int (*get_cubin_)(Handle, char*) = nullptr;
  int version_ = 0;
  std::string path_, identity_;
};

}  // namespace jaxlowbit::jit
