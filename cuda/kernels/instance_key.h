// SPDX-License-Identifier: Apache-2.0
//
// Key of a kernel template instance, for lookup and for naming it to NVRTC. Each kernel makes its keys
// (kernels/*/instances.h) and omits facts that its instances do not depend on, so one instance has one key.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Kernel templates, named after their folders.
enum class Family { kSm80, kSm80Transposed, kSm90Stream, kSm90 };

inline constexpr const char* kFamilyNames[] = {"sm80", "sm80_transposed", "sm90_stream", "sm90"};
inline constexpr int kNumFamilies = static_cast<int>(std::size(kFamilyNames));

inline const char* NameOf(Family family) { return kFamilyNames[static_cast<int>(family)]; }

struct InstanceKey {
  Family family = Family::kSm80;
  ElementType lhs = ElementType::kBf16, scale = ElementType::kBf16;
  ZeroKind zero = ZeroKind::kNone;
  int bits = 4;
  Codebook codebook = Codebook::kNone;
  int variant = 0;  // other template arguments, encoded by the family

  // Injective: different keys have different numbers.
  constexpr uint32_t number() const {
    uint32_t number = static_cast<uint32_t>(variant);
    number = number << 4 | static_cast<uint32_t>(bits);
    number = number * kNumCodebooks + static_cast<uint32_t>(codebook);
    number = number * kNumElementTypes + static_cast<uint32_t>(scale);
    number = number * kNumElementTypes + static_cast<uint32_t>(lhs);
    for (int field : {static_cast<int>(zero), static_cast<int>(family)}) {
      number = number << 2 | static_cast<uint32_t>(field);
    }
    return number;
  }
  constexpr bool operator==(const InstanceKey& other) const { return number() == other.number(); }
};

// Whether Hopper's kernels are compiled ahead of time for zeros of a kind. 8-bit weights rarely have zeros.
constexpr bool HasPrebuiltZeros(int bits, ZeroKind zero) {
  return zero == ZeroKind::kNone || (zero == ZeroKind::kInteger && bits == 4);
}

// Whether instances of a family are compiled ahead of time for a format: integers of kKernelBits with 16-bit or 32-bit
// scales. Hopper's kernels are limited to the common formats: scales of the type of lhs, zeros as above. Transposed
// products, which only derivatives use, are always JIT-compiled. `Format`: InstanceKey or QuantizedMatmul.
template <typename Format>
constexpr bool IsPrebuiltFormat(Family family, const Format& format) {
  bool has_width = false;
  for (int width : kKernelBits) has_width |= width == format.bits;
  const bool hopper = family == Family::kSm90 || family == Family::kSm90Stream;
  return has_width && family != Family::kSm80Transposed && format.codebook == Codebook::kNone &&
         !Is8Bit(format.scale) && !Is8Bit(format.lhs) &&
         (!hopper || (format.scale != ElementType::kF32 &&
                      HasPrebuiltZeros(static_cast<int>(format.bits), format.zero)));
}
constexpr bool IsPrebuiltFormat(const InstanceKey& key) {
  return IsPrebuiltFormat(key.family, key);
}

// The instance that computes `problem` by `choice`.
InstanceKey KeyOf(const QuantizedMatmul& problem, const Choice& choice, const Device& device);

// The instance as a C++ expression, for NVRTC.
std::string NameOf(const InstanceKey& key);

// All instances for a width.
std::vector<InstanceKey> InstancesOf(int bits);

// Whether a codebook of this kind exists for this width.
constexpr bool HasCodebook(int bits, Codebook codebook) {
  if (codebook == Codebook::kTable) return bits <= kMaxTableBits;
  return codebook == Codebook::kNone || bits == BitsOf(codebook);
}

// Whether this scale type supports this width and codebook: int8 scales need 2-bit to 4-bit integers, two-level scales
// need integers.
constexpr bool HasScale(int bits, Codebook codebook, ElementType scale) {
  if (HasTwoLevels(scale)) return codebook == Codebook::kNone;
  return scale != ElementType::kInt8 || (codebook == Codebook::kNone && 2 <= bits && bits <= 4);
}

// Whether this kind of zeros is supported. Two-level scales: none or float. Other 8-bit scales, codebooks: none.
// Otherwise: any.
constexpr bool HasZero(Codebook codebook, ElementType scale, ZeroKind zero) {
  if (zero == ZeroKind::kNone) return true;
  if (HasTwoLevels(scale)) return zero == ZeroKind::kFloat;
  return codebook == Codebook::kNone && !Is8Bit(scale);
}

// Calls visit(key) for each combination of types and codebooks that a family supports with a 16-bit lhs. Only
// kSm90Stream supports two-level scales.
template <typename Visit>
void ForEachFormat(Family family, int bits, Visit visit) {
  for (int number = 0; number < kNumCodebooks; ++number) {
    const auto codebook = static_cast<Codebook>(number);
    if (!HasCodebook(bits, codebook)) continue;
    for (ElementType lhs : {ElementType::kF16, ElementType::kBf16}) {
      for (int type = 0; type < kNumElementTypes; ++type) {
        const auto scale = static_cast<ElementType>(type);
        if (scale != ElementType::kF32 && scale != lhs && !Is8Bit(scale)) continue;
        if (!HasScale(bits, codebook, scale)) continue;
        if (HasTwoLevels(scale) && family != Family::kSm90Stream) continue;
        for (ZeroKind zero : {ZeroKind::kNone, ZeroKind::kInteger, ZeroKind::kFloat}) {
          if (!HasZero(codebook, scale, zero)) continue;
          visit(InstanceKey{family, lhs, scale, zero, bits, codebook, 0});
        }
      }
    }
  }
}

// Whether the tensor cores can multiply this 8-bit lhs by 8-bit weights (device/format/bytes.cuh): quantized values,
// q - z, or (q - 8) * s with integer scales. q - z fits 8 bits only for 4-bit q.
constexpr bool Supports8BitLhs(ElementType lhs, int bits, Codebook codebook, ElementType scale,
                               ZeroKind zero) {
  if (lhs == ElementType::kE4m3) {
    return codebook == Codebook::kE4m3 && !Is8Bit(scale) && zero == ZeroKind::kNone;
  }
  if (lhs != ElementType::kInt8 || codebook != Codebook::kNone) return false;
  if (scale == ElementType::kInt8 || zero == ZeroKind::kInteger) {
    return bits == 4 && (zero == ZeroKind::kNone || !Is8Bit(scale));
  }
  return (bits == 4 || bits == 8) && !Is8Bit(scale) && zero == ZeroKind::kNone;
}

// Calls visit(key) for each combination that Supports8BitLhs.
template <typename Visit>
void ForEachByteFormat(int bits, Visit visit) {
  for (ElementType lhs : {ElementType::kInt8, ElementType::kE4m3}) {
    for (int number = 0; number < kNumCodebooks; ++number) {
      const auto codebook = static_cast<Codebook>(number);
      if (!HasCodebook(bits, codebook)) continue;
      for (ElementType scale : {ElementType::kF32, ElementType::kBf16, ElementType::kInt8}) {
        for (ZeroKind zero : {ZeroKind::kNone, ZeroKind::kInteger}) {
          if (!Supports8BitLhs(lhs, bits, codebook, scale, zero)) continue;
          visit(InstanceKey{Family::kSm90, lhs, scale, zero, bits, codebook, 0});
        }
      }
    }
  }
}

// C++ names of template arguments. The codebook is the last argument; instances for integers omit it.
inline std::string CudaName(ElementType type) {
#define JAXLOWBIT_NAME(enumerator, name, bytes, device_type, xla_type) device_type,
  constexpr const char* kNames[] = {JAXLOWBIT_ELEMENT_TYPES(JAXLOWBIT_NAME)};
#undef JAXLOWBIT_NAME
  return kNames[static_cast<int>(type)];
}
inline std::string LastArgument(Codebook codebook) {
#define JAXLOWBIT_NAME(enumerator, name, bits, exponent_bits, cost) #enumerator,
  constexpr const char* kNames[] = {JAXLOWBIT_CODEBOOKS(JAXLOWBIT_NAME)};
#undef JAXLOWBIT_NAME
  if (codebook == Codebook::kNone) return "";
  return std::string(", jaxlowbit::Codebook::") + kNames[static_cast<int>(codebook)];
}
inline std::string CudaName(ZeroKind zero) {
  return std::string("jaxlowbit::ZeroKind::") + (zero == ZeroKind::kNone      ? "kNone"
                                                 : zero == ZeroKind::kInteger ? "kInteger"
                                                                              : "kFloat");
}

}  // namespace jaxlowbit
