// SPDX-License-Identifier: Apache-2.0
//
// XLA's FFI, held to API 0.3. A runtime refuses handlers of a newer API than its own and accepts
// older ones, so a module built with a new jaxlib must not say that it is new.
//
// Handlers compile with the headers of jaxlib 0.10 too, in which a const `ffi::Result` cannot be dereferenced.
#pragma once

#include "xla/ffi/api/c_api.h"

#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 3

#include "xla/ffi/api/ffi.h"

namespace jaxlowbit {

namespace ffi = ::xla::ffi;

}  // namespace jaxlowbit
