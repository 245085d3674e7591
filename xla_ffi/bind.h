// SPDX-License-Identifier: Apache-2.0
//
// Parts of the Python module that other files define.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxlowbit {

// Products and steps as numbers (record.cc).
void BindRecords(nanobind::module_& module);

// The compiler of kernels (cuda_jit.cc).
void BindJit(nanobind::module_& module);

}  // namespace jaxlowbit
