// SPDX-License-Identifier: Apache-2.0

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/jit/compiler.h"
#include "cuda/jit/kernels.h"
#include "xla_ffi/jit.h"

namespace nb = nanobind;

namespace jaxlowbit {
namespace {

nb::dict Toolchain() {
  const jit::Toolchain found = jit::FindToolchain();
  nb::dict toolchain;
  toolchain["error"] = found.error;
  toolchain["compiler"] = found.compiler;
  toolchain["path"] = found.path;
  toolchain["cache"] = found.cache;
  return toolchain;
}

jit::Instance InstanceOf(const std::string& kernel, const std::string& expression) {
  for (const jit::KernelSource& source : jit::kKernels) {
    if (kernel == source.name) {
      return {source.header, expression, source.params, source.params_bytes, source.wgmma};
    }
  }
  throw nb::value_error(("there is no kernel " + kernel).c_str());
}

// Compiles instances at the same time. Without `wait` returns an empty list at once.
nb::list Compile(const std::vector<std::pair<std::string, std::string>>& instances,
                 const std::string& architecture, bool wait) {
  std::vector<jit::Result> results;
  for (const auto& [kernel, expression] : instances) {
    results.push_back(jit::Start(InstanceOf(kernel, expression), architecture));
  }
  nb::list compiled;
  if (!wait) return compiled;
  {
    const nb::gil_scoped_release release;
    for (const jit::Result& result : results) result.wait();
  }
  for (const jit::Result& result : results) {
    const jit::Compiled& one = result.get();
    nb::dict fields;
    fields["cubin"] = nb::bytes(one.cubin.data(), one.cubin.size());
    fields["error"] = one.error;
    fields["cached"] = one.cached;
    fields["seconds"] = one.seconds;
    compiled.append(fields);
  }
  return compiled;
}

}  // namespace

void BindJit(nb::module_& module) {
  nb::module_::import_("atexit").attr("register")(
      nb::cpp_function(&jit::Finish, nb::call_guard<nb::gil_scoped_release>()));
  module.def("toolchain", &Toolchain);
  module.def("set_nvrtc_paths", &jit::SetNvrtcPaths, nb::arg("paths"));
  module.def("compile", &Compile, nb::arg("instances"), nb::arg("architecture"), nb::kw_only(),
             nb::arg("wait") = true);
}

}  // namespace jaxlowbit
