// SPDX-License-Identifier: Apache-2.0
//
// Bindings of the Python module that are defined in other files.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxlowbit {

// Encoding of products and steps (record.cc).
void BindRecords(nanobind::module_& module);

// The JIT compiler (cuda_jit.cc).
void BindJit(nanobind::module_& module);

}  // namespace jaxlowbit
