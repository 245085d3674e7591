// SPDX-License-Identifier: Apache-2.0
//
// XLA's FFI, pinned to API 0.3. A runtime rejects handlers of a newer API than its own and accepts older ones, so a
// module built with a new jaxlib must not report the new version.
//
// Handlers also compile with the headers of jaxlib 0.10, whose `ffi::Result` cannot be dereferenced if const.
#pragma once

#include "xla/ffi/api/c_api.h"

#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 3

#include "xla/ffi/api/ffi.h"

namespace jaxlowbit {

namespace ffi = ::xla::ffi;

// All attributes of a call, as XLA's C struct. ffi::Dictionary decodes them, but does not show their bytes.
struct RawAttributes {
  const XLA_FFI_Attrs* attrs;
};

// XLA's C structs, which its C++ wrappers do not show.
struct RawArgs : ffi::RemainingArgs {
  using ffi::RemainingArgs::args;
};
struct RawRets : ffi::RemainingRets {
  using ffi::RemainingRets::rets;
};

}  // namespace jaxlowbit

template <>
struct xla::ffi::AttrDecoding<jaxlowbit::RawAttributes> {
  using Type = jaxlowbit::RawAttributes;
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* attrs, DiagnosticEngine&) {
    return Type{static_cast<const XLA_FFI_Attrs*>(attrs)};
  }
};
