// SPDX-License-Identifier: Apache-2.0

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/jit/compiler.h"
#include "cuda/jit/kernels.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/loaded.h"
#include "xla_ffi/bind.h"

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

jit::Instance InstanceOf(const std::string& family, const std::string& expression) {
  for (int i = 0; i < kNumFamilies; ++i) {
    const auto& [header, params, params_bytes] = jit::kKernels[i];
    if (family == kFamilyNames[i]) return {header, expression, params, params_bytes};
  }
  throw nb::value_error(("there is no kernel " + family).c_str());
}

// All instances for a width: family, C++ expression, whether it is in the binary; then the names of the lhs and scale
// types, the kind of zeros and the codebook, as in a record.
nb::list ListInstances(int bits) {
  nb::list instances;
  for (const InstanceKey& key : InstancesOf(bits)) {
    instances.append(nb::make_tuple(NameOf(key.family), NameOf(key), IsAheadOfTime(key),
                                    kElementTypeNames[static_cast<int>(key.lhs)],
                                    kElementTypeNames[static_cast<int>(key.scale)],
                                    kZeroKindNames[static_cast<int>(key.zero)],
                                    kCodebookNames[static_cast<int>(key.codebook)]));
  }
  return instances;
}

nb::dict Loaded() {
  const LoadCounts counts = CountLoaded();
  nb::dict loaded;
  loaded["ahead_of_time"] = counts.ahead_of_time;
  loaded["compiled"] = counts.compiled;
  loaded["cached"] = counts.cached;
  return loaded;
}

// Compiles instances concurrently. Without `wait`, returns an empty list at once.
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
  module.def("instances", &ListInstances, nb::arg("bits"));
  module.def("loaded", &Loaded);
  module.def("architecture", &jit::ArchitectureName, nb::arg("compute_capability"));
  module.def("compile", &Compile, nb::arg("instances"), nb::arg("architecture"), nb::kw_only(),
             nb::arg("wait") = true);
}

}  // namespace jaxlowbit
