// SPDX-License-Identifier: Apache-2.0
//
// What Python asks of the compiler of kernels.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxlowbit {

void BindJit(nanobind::module_& module);

}  // namespace jaxlowbit
