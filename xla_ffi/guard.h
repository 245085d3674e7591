// SPDX-License-Identifier: Apache-2.0
//
// Wraps every handler for XLA: exceptions do not escape, and errors name the function that the user called.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "xla_ffi/ffi.h"

namespace jaxlowbit {

inline ffi::Error InvalidArgument(const std::string& sentence) {
  return ffi::Error::InvalidArgument(sentence);
}

// The error, which begins with the public function that the user called.
inline ffi::Error Named(std::string_view caller, const ffi::Error& error) {
  // Some versions of XLA return the code itself.
  const std::optional<ffi::ErrorCode> code = error.errc();
  return ffi::Error(code.value_or(ffi::ErrorCode::kInternal),
                    std::string(caller) + ": " + error.message());
}

// The error of the exception that is being handled.
inline ffi::Error Thrown(std::string_view caller) {
  try {
    throw;
  } catch (const std::exception& exception) {
    return ffi::Error::Internal(std::string(caller) + ": the handler failed with " +
                                exception.what() + ".");
  } catch (...) {
    return ffi::Error::Internal(std::string(caller) + ": the handler failed.");
  }
}

// Runs `handle`, which returns an error; `caller` is the public function that the user called.
template <typename Handle>
ffi::Error Guard(std::string_view caller, Handle handle) {
  try {
    const ffi::Error error = handle();
    return error.success() ? error : Named(caller, error);
  } catch (...) {
    return Thrown(caller);
  }
}

}  // namespace jaxlowbit
