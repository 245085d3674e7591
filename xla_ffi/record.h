// SPDX-License-Identifier: Apache-2.0
//
// Encodes products and steps as s64 numbers, in the order of their fields. Python encodes fields by name (record.cc),
// handlers decode them (call.h), and neither depends on positions.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "cuda/problem.h"

namespace jaxlowbit {

enum class StepKind { kMultiply, kRound, kNormalize, kAttend, kGroup, kCombine, kRoute };

inline constexpr const char* kStepKindNames[] = {"multiply", "round",   "normalize", "attend",
                                                 "group",    "combine", "route"};

// The 8-bit type that a rounding step produces.
constexpr Rounding RoundingTo(ElementType to) {
  return to == ElementType::kE4m3 ? Rounding::kE4m3 : Rounding::kInt8;
}

struct Places {
#define JAXLOWBIT_PLACE(name) int64_t name = 0;
#include "xla_ffi/call.def"
};

struct Step {
#define JAXLOWBIT_STEP_FIELD(type, name, value) type name = value;
#include "xla_ffi/call.def"
};

template <typename Record, typename Visit>
constexpr void VisitPlaces(Record& places, Visit visit) {
#define JAXLOWBIT_PLACE(name) visit(#name, places.name);
#include "xla_ffi/call.def"
}

template <typename Record, typename Visit>
constexpr void VisitStep(Record& step, Visit visit) {
#define JAXLOWBIT_STEP_FIELD(type, name, value) visit(#name, step.name);
#include "xla_ffi/call.def"
}

// Numbers per record: a product has fields, then places; a step has fields.
inline constexpr size_t kPlaces = sizeof(Places) / sizeof(int64_t);
inline constexpr size_t kProductNumbers = kRecordFields + kPlaces;
inline constexpr size_t kStepNumbers = [] {
  size_t count = 0;
  Step step;
  VisitStep(step, [&](const char*, auto&) { ++count; });
  return count;
}();

// Fills fields from numbers; `wrong`: the name of the first one whose type lacks its number, or "".
struct NumberReader {
  const int64_t* next;
  std::string_view wrong = "";

  template <typename Field>
  constexpr void operator()(const char* name, Field& field);
};

struct Names {
  const char* const* begin;
  int count;
};

template <int count>
constexpr Names NamesIn(const char* const (&names)[count]) {
  return {names, count};
}
constexpr Names NamesOf(ElementType) { return NamesIn(kElementTypeNames); }
constexpr Names NamesOf(ZeroKind) { return NamesIn(kZeroKindNames); }
constexpr Names NamesOf(Activation) { return NamesIn(kActivationNames); }
constexpr Names NamesOf(Codebook) { return NamesIn(kCodebookNames); }
constexpr Names NamesOf(StepKind) { return NamesIn(kStepKindNames); }

// Sets a field; returns false if the number is out of range for its type.
template <typename Field>
constexpr bool Set(int64_t number, Field* field) {
  int64_t first = 0, last = 0;
  if constexpr (std::is_enum_v<Field>) {
    last = NamesOf(Field()).count - 1;
  } else if constexpr (std::is_same_v<Field, bool>) {
    last = 1;
  } else {
    first = std::numeric_limits<Field>::min(), last = std::numeric_limits<Field>::max();
  }
  *field = static_cast<Field>(number);
  return first <= number && number <= last;
}

template <typename Field>
constexpr void NumberReader::operator()(const char* name, Field& field) {
  if (!Set(*next++, &field) && wrong.empty()) wrong = name;
}

// Decodes a product, and the places of its buffers. Returns NumberReader::wrong.
inline std::string_view DecodeProduct(const int64_t* numbers, QuantizedMatmul* problem,
                                      Places* places) {
  NumberReader read = {numbers};
  VisitRecord(*problem, [&](const char* name, auto& field) { read(name, field); });
  VisitPlaces(*places, [&](const char* name, auto& field) { read(name, field); });
  problem->group_size = GroupSize(problem->group_size, problem->k, problem->scale);
  return read.wrong;
}

inline std::string_view DecodeStep(const int64_t* numbers, Step* step) {
  NumberReader read = {numbers};
  VisitStep(*step, [&](const char* name, auto& field) { read(name, field); });
  return read.wrong;
}

// Hash of the names and types of all fields, in order, and of the enum values. Programs with another hash come from
// another version of the library and are rejected.
inline constexpr int64_t kSchema = [] {
  uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&](std::string_view text) {
    for (char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
    hash = (hash ^ ';') * 0x100000001b3;
  };
  for (std::string_view text : {
#define JAXLOWBIT_PRODUCT_FIELD(type, name, value) #type " " #name,
#include "cuda/product.def"
#define JAXLOWBIT_EPILOGUE_FIELD(type, name, value) #type " " #name,
#include "cuda/product.def"
#define JAXLOWBIT_PLACE(name) #name,
#include "xla_ffi/call.def"
#define JAXLOWBIT_STEP_FIELD(type, name, value) #type " " #name,
#include "xla_ffi/call.def"
       }) {
    mix(text);
  }
  for (const Names& names : {NamesOf(ElementType()), NamesOf(ZeroKind()), NamesOf(Activation()),
                             NamesOf(Codebook()), NamesOf(StepKind())}) {
    for (int i = 0; i < names.count; ++i) mix(names.begin[i]);
  }
  return static_cast<int64_t>(hash >> 1);
}();

}  // namespace jaxlowbit
