// SPDX-License-Identifier: Apache-2.0
//
// An instance of a kernel template as a value: to look it up, and to name it for a compiler. Kernels make their keys
// (kernels/*/instances.h), and leave out what their instances do not depend on, so that one instance has one key.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Kernel templates, by the names of their folders.
enum class Family { kSm80, kSm80Transposed, kSm90Stream, kSm90 };

inline constexpr const char* kFamilyNames[] = {"sm80", "sm80_transposed", "sm90_stream", "sm90"};
inline constexpr int kNumFamilies = static_cast<int>(std::size(kFamilyNames));

inline const char* NameOf(Family family) { return kFamilyNames[static_cast<int>(family)]; }

struct InstanceKey {
  Family family = Family::kSm80;
  ElementType lhs = ElementType::kBf16, scale = ElementType::kBf16;
  ZeroKind zero = ZeroKind::kNone;
  int bits = 4;
  int variant = 0;  // the family's own number of what else the instance is compiled for

  // A number for each key.
  constexpr uint32_t number() const {
    uint32_t number = static_cast<uint32_t>(variant);
    number = number << 4 | static_cast<uint32_t>(bits);
    for (int field : {static_cast<int>(zero), static_cast<int>(scale), static_cast<int>(lhs),
                      static_cast<int>(family)}) {
      number = number << 2 | static_cast<uint32_t>(field);
    }
    return number;
  }
  constexpr bool operator==(const InstanceKey& other) const { return number() == other.number(); }
};

// Whether the build holds the instances of a family for a format. Of Hopper's kernels it holds what most programs run:
// scales of the type of lhs, and no float zeros.
constexpr bool IsBuilt(Family family, ElementType scale, ZeroKind zero, int bits) {
  bool has_width = false;
  for (int width : kKernelBits) has_width |= width == bits;
  const bool hopper = family == Family::kSm90 || family == Family::kSm90Stream;
  return has_width && (!hopper || (scale != ElementType::kF32 && zero != ZeroKind::kFloat));
}
constexpr bool IsBuilt(const InstanceKey& key) {
  return IsBuilt(key.family, key.scale, key.zero, key.bits);
}

// The instance that computes `problem` by `choice`.
InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device);

// The instance as a C++ expression.
std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// Calls visit(key) with a key of each combination of types that kernels take, with and without zeros.
template <typename Visit>
void ForEachFormat(Family family, int bits, Visit visit) {
  for (ElementType lhs : {ElementType::kF16, ElementType::kBf16}) {
    for (ElementType scale : {ElementType::kF32, lhs}) {
      for (ZeroKind zero : {ZeroKind::kNone, ZeroKind::kInteger, ZeroKind::kFloat}) {
        visit(InstanceKey{family, lhs, scale, zero, bits, 0});
      }
    }
  }
}

// How C++ names a type of elements and a kind of zeros.
inline std::string CudaName(ElementType type) {
  return type == ElementType::kF32    ? "float"
         : type == ElementType::kBf16 ? "__nv_bfloat16"
                                      : "__half";
}
inline std::string CudaName(ZeroKind zero) {
  return std::string("jaxlowbit::ZeroKind::") + (zero == ZeroKind::kNone      ? "kNone"
                                                 : zero == ZeroKind::kInteger ? "kInteger"
                                                                              : "kFloat");
}

}  // namespace jaxlowbit
