// SPDX-License-Identifier: Apache-2.0
//
// Python bindings of the kernel compiler.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxlowbit {

void BindJit(nanobind::module_& module);

}  // namespace jaxlowbit
