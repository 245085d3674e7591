// SPDX-License-Identifier: Apache-2.0
//
// XLA's buffers: types, shapes, extents, and the errors for buffers that do not match.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
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
  switch (type) {
    case ElementType::kF32:
      return ffi::DataType::F32;
    case ElementType::kBf16:
      return ffi::DataType::BF16;
    case ElementType::kF16:
      return ffi::DataType::F16;
    case ElementType::kE8m0:
      return ffi::DataType::F8E8M0FNU;
    case ElementType::kE4m3:
      return ffi::DataType::F8E4M3FN;
    case ElementType::kInt8:
      return ffi::DataType::S8;
    case ElementType::kSuper:
      return ffi::DataType::U8;
    case ElementType::kInt32:
      return ffi::DataType::S32;
  }
  return ffi::DataType::INVALID;
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

inline std::string TypeName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return "f32";
    case ffi::DataType::BF16:
      return "bf16";
    case ffi::DataType::F16:
      return "f16";
    case ffi::DataType::F8E8M0FNU:
      return "f8e8m0fnu";
    case ffi::DataType::F8E4M3FN:
      return "f8e4m3fn";
    case ffi::DataType::S8:
      return "s8";
    case ffi::DataType::U8:
      return "u8";
    case ffi::DataType::U32:
      return "u32";
    case ffi::DataType::S32:
      return "s32";
    default:
      return "XLA type " + std::to_string(static_cast<int>(type));
  }
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
