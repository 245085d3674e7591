// SPDX-License-Identifier: Apache-2.0
//
// XLA's buffers: types, shapes, extents, and the errors for buffers that do not match.
#pragma once

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "cuda/extents.h"
#include "cuda/types.h"
#include "xla_ffi/guard.h"

namespace jaxlowbit {

inline Extent ExtentOf(ffi::AnyBuffer buffer) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
}

// XLA's type for an element type.
inline ffi::DataType TypeOf(ElementType type) {
#define JAXLOWBIT_TYPE(enumerator, name, bytes, device_type, xla_type) ffi::DataType::xla_type,
  constexpr ffi::DataType kTypes[] = {JAXLOWBIT_ELEMENT_TYPES(JAXLOWBIT_TYPE)};
#undef JAXLOWBIT_TYPE
  return kTypes[static_cast<int>(type)];
}

inline std::optional<ElementType> FloatType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return ElementType::kF32;
    case ffi::DataType::BF16:
      return ElementType::kBf16;
    case ffi::DataType::F16:
      return ElementType::kF16;
    default:
      return std::nullopt;
  }
}

// A type in the notation of HLO, such as f8e4m3fn.
inline std::string TypeName(ffi::DataType type) {
  std::ostringstream text;
  text << static_cast<XLA_FFI_DataType>(type);
  std::string name = text.str();
  for (char& letter : name) letter = static_cast<char>(std::tolower(letter));
  return name;
}

template <typename Dimensions>
std::string ShapeName(const Dimensions& dimensions) {
  std::string text = "[";
  for (int64_t size : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline bool HasShape(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> expected) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end());
}

// Handlers run before and in every execution, so checks format text only for an error.
inline ffi::Error CheckShape(std::string_view name, const ffi::AnyBuffer& buffer,
                             std::initializer_list<int64_t> expected, std::string_view rule) {
  if (HasShape(buffer, expected)) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " has shape " + ShapeName(buffer.dimensions()) +
                         " but must be " + std::string(rule) + " = " + ShapeName(expected) + ".");
}

inline ffi::Error CheckCount(std::string_view name, const ffi::AnyBuffer& buffer, int64_t expected,
                             std::string_view rule) {
  if (static_cast<int64_t>(buffer.element_count()) == expected) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " has shape " + ShapeName(buffer.dimensions()) +
                         " but must have " + std::string(rule) + " = " + std::to_string(expected) +
                         " elements.");
}

inline ffi::Error CheckRank(std::string_view name, const ffi::AnyBuffer& buffer, size_t rank,
                            std::string_view rule) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " has shape " + ShapeName(buffer.dimensions()) +
                         " but must be " + std::string(rule) + ".");
}

inline ffi::Error CheckType(std::string_view name, const ffi::AnyBuffer& buffer, bool valid,
                            std::string_view rule) {
  if (valid) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " is " + TypeName(buffer.element_type()) +
                         " but must be " + std::string(rule) + ".");
}

inline ffi::Error CheckType(std::string_view name, const ffi::AnyBuffer& buffer,
                            ffi::DataType expected) {
  if (buffer.element_type() == expected) return ffi::Error::Success();
  return CheckType(name, buffer, false, TypeName(expected));
}

}  // namespace jaxlowbit
