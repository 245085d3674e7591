// SPDX-License-Identifier: Apache-2.0
//
// The attributes of a call, by name. Programs may be exported by one version of the library and run by another, so
// every call carries the version of its attributes and operands, and the version of the packed layout.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>

#include "xla_ffi/guard.h"

namespace jaxlowbit {

// A call has the lowest version that says all it needs, so that earlier releases run what they can. All are read.
inline constexpr int64_t kCallVersion = 1;
inline constexpr int64_t kCodebookCallVersion = 2;     // has a codebook
inline constexpr int64_t kNarrowScaleCallVersion = 3;  // has 8-bit scales, and perhaps a codebook
inline constexpr int64_t kSuperScaleCallVersion = 4;   // has scales of two levels, and perhaps both
inline constexpr int64_t kUnitCallVersion = 5;  // has weights with units, and perhaps all of these
inline constexpr int64_t kLayoutVersion = 1;    // docs/layout.md

// Numbers of each product in the attribute `products` (cuda_instantiate.cc).
inline constexpr size_t kProductNumbers = 15;

class Attributes {
 public:
  explicit Attributes(ffi::Dictionary dictionary) : dictionary_(dictionary) {}

  // Returns a default value for a missing attribute, which Check reports.
  template <typename T>
  T Get(std::string_view name) {
    const auto value = dictionary_.get<T>(name);
    if (value.has_value()) return *value;
    if (missing_.empty()) missing_ = name;
    return T();
  }

  // Returns, as Get does, what calls with codebooks alone have; empty for others.
  template <typename T>
  ffi::Span<const T> OfCodebooks(std::string_view name) {
    const auto version = dictionary_.get<int64_t>("version");
    const bool has_codebook = version.has_value() && *version == kCodebookCallVersion;
    if (!has_codebook && !dictionary_.contains("codebook")) return {};
    return Get<ffi::Span<const T>>(name);
  }

  // Says what is wrong with the versions, or which attribute is missing.
  ffi::Error Check() {
    for (auto [name, first, last, what] :
         {std::tuple{"version", kCallVersion, kUnitCallVersion, "the calls of version "},
          std::tuple{"layout_version", kLayoutVersion, kLayoutVersion,
                     "words packed with layout version "}}) {
      const auto found = dictionary_.get<int64_t>(name);
      if (found.has_value() && first <= *found && *found <= last) continue;
      return Refuse(std::string("this program has ") + what +
                    (found.has_value() ? std::to_string(*found) : "0") +
                    " of jaxlowbit, but this library reads version " + std::to_string(last) +
                    "; export the program again with this library, or run it with the one that "
                    "exported it.");
    }
    if (missing_.empty()) return ffi::Error::Success();
    return Refuse("the call has no attribute " + missing_ +
                  " of the right type; export the program again with this library.");
  }

 private:
  ffi::Dictionary dictionary_;
  std::string missing_;
};

}  // namespace jaxlowbit
