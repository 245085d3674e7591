// SPDX-License-Identifier: Apache-2.0
//
// Python's functions for products and steps as numbers.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxlowbit {

void BindRecords(nanobind::module_& module);

}  // namespace jaxlowbit
