// SPDX-License-Identifier: Apache-2.0
//
// Python bindings that encode products and steps.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxlowbit {

void BindRecords(nanobind::module_& module);

}  // namespace jaxlowbit
