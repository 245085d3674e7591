// SPDX-License-Identifier: Apache-2.0

#include "cuda/jit/nvrtc.h"

#include <dlfcn.h>
#include <sys/stat.h>

namespace jaxlowbit::jit {
namespace {

constexpr int kMinVersion = 1303;  // earlier versions may overwrite operands of wgmma in flight

template <typename F>
bool Find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

std::string VersionName(int version) {
  return std::to_string(version / 100) + "." + std::to_string(version % 100);
}

// Loads NVRTC's builtins library ahead of NVRTC, which opens it by name only: CUDA 13.0 wheels have no rpath to it.
void LoadBuiltins(const std::string& nvrtc_path, int version) {
  const size_t slash = nvrtc_path.rfind('/');
  if (slash == std::string::npos) return;
  const std::string name = "libnvrtc-builtins.so." + VersionName(version);
  dlopen((nvrtc_path.substr(0, slash + 1) + name).c_str(), RTLD_NOW | RTLD_GLOBAL);
}

}  // namespace

bool Nvrtc::FindFunctions(void* library) {
  return Find(library, "nvrtcVersion", &get_version_) &&
         Find(library, "nvrtcGetErrorString", &get_error_string_) &&
         Find(library, "nvrtcCreateProgram", &create_) &&
         Find(library, "nvrtcDestroyProgram", &destroy_) &&
         Find(library, "nvrtcAddNameExpression", &add_expression_) &&
         Find(library, "nvrtcCompileProgram", &compile_) &&
         Find(library, "nvrtcGetProgramLogSize", &get_log_size_) &&
         Find(library, "nvrtcGetProgramLog", &get_log_) &&
         Find(library, "nvrtcGetCUBINSize", &get_cubin_size_) &&
         Find(library, "nvrtcGetCUBIN", &get_cubin_);
}

// Does not unload a library that is too old, since others may use it.
bool Nvrtc::Open(const std::string& path, std::string* error) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  int major = 0, minor = 0;
  if (!FindFunctions(library) || get_version_(&major, &minor) != 0) {
    *error = "the libnvrtc that was found lacks functions";
    return false;
  }
  version_ = 100 * major + minor;
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(get_version_), &info) != 0) path_ = info.dli_fname;
  if (version_ >= kMinVersion) return true;
  *error = "NVRTC is of version " + VersionName(version_) + " but must be of " +
           VersionName(kMinVersion) + " or newer; pip install 'jaxlowbit[cuda]'";
  return false;
}

const Nvrtc* Nvrtc::Load(const std::vector<std::string>& paths, std::string* error) {
  std::vector<std::string> candidates = paths;
  candidates.insert(candidates.end(), {"libnvrtc.so.13", "libnvrtc.so"});
  *error = "libnvrtc.so.13 was not found; pip install 'jaxlowbit[cuda]'";
  for (const std::string& candidate : candidates) {
    auto* nvrtc = new Nvrtc;  // never freed, like the library
    if (nvrtc->Open(candidate, error)) {
      error->clear();
      LoadBuiltins(nvrtc->path_, nvrtc->version_);
      struct stat file = {};
      stat(nvrtc->path_.c_str(), &file);
      nvrtc->identity_ = "nvrtc " + VersionName(nvrtc->version_) + " of " +
                         std::to_string(file.st_size) + " bytes";
      return nvrtc;
    }
    delete nvrtc;
  }
  return nullptr;
}

std::string Nvrtc::Compile(const Program& program, std::string* error) const {
  std::vector<const char*> names, texts, options;
  for (const auto& [name, text] : program.headers) {
    names.push_back(name);
    texts.push_back(text);
  }
  for (const std::string& option : program.options) options.push_back(option.c_str());
  options.push_back(
      "--no-cache");  // NVRTC's cache would initialize the driver and store cubins twice
  Handle handle = nullptr;
  int status = create_(&handle, program.source.c_str(), "jaxlowbit.cu",
                       static_cast<int>(names.size()), texts.data(), names.data());
  if (status == 0) status = add_expression_(handle, program.expression.c_str());
  if (status == 0) status = compile_(handle, static_cast<int>(options.size()), options.data());
  std::string cubin;
  size_t size = 0;
  if (status == 0) status = get_cubin_size_(handle, &size);
  if (status == 0) {
    cubin.resize(size);
    status = get_cubin_(handle, cubin.data());
  }
  if (status != 0) {
    cubin.clear();
    *error = std::string("NVRTC ") + VersionName(version_) + ": " + get_error_string_(status);
    if (handle != nullptr && get_log_size_(handle, &size) == 0 && size > 1) {
      std::string log(size - 1, '\0');
      get_log_(handle, log.data());
      *error += "\n" + log;
    }
  }
  if (handle != nullptr) destroy_(&handle);
  return cubin;
}

}  // namespace jaxlowbit::jit
