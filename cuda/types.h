// SPDX-License-Identifier: Apache-2.0
//
// Types that problems and device code share: element types and the atom of the packed layout. Host compilers, nvcc and
// NVRTC compile this header.
#pragma once

#include <cstdint>

#include "cuda/device/format/kinds.h"
#include "cuda/device/host_device.h"
#include "cuda/device/schedule/weight_number.h"

namespace jaxlowbit {

// Rows and columns of the packed layout's atom (docs/layout.md).
inline constexpr int64_t kAtom = 64;

// Two-level scales: rows of weights per super-block, which share floats that multiply their groups' integer scales;
// rows of 64 bytes with these floats, after the integers (docs/layout.md).
inline constexpr int64_t kSuperBlock = 256, kFloatRows = 2;

// Bit widths of the CUDA kernels: with prebuilt instances, and with JIT-compiled instances only.
inline constexpr int kKernelBits[] = {4, 8};
inline constexpr int kCompiledBits[] = {1, 2, 3, 5, 6, 7};

// Element types: enumerator, name, bytes, type in device code, and type of XLA. 8-bit scales: kE8m0 (powers of two),
// kE4m3, kInt8, kSuper (bytes of two-level scales). Quantized activations: kE4m3, kInt8. Results of integer matmuls:
// kInt32.
#define JAXLOWBIT_ELEMENT_TYPES(TYPE)                            \
  TYPE(kF32, "float32", 4, "float", F32)                         \
  TYPE(kBf16, "bfloat16", 2, "__nv_bfloat16", BF16)              \
  TYPE(kF16, "float16", 2, "__half", F16)                        \
  TYPE(kE8m0, "float8_e8m0fnu", 1, "jaxlowbit::E8m0", F8E8M0FNU) \
  TYPE(kE4m3, "float8_e4m3fn", 1, "jaxlowbit::E4m3", F8E4M3FN)   \
  TYPE(kInt8, "int8", 1, "int8_t", S8)                           \
  TYPE(kSuper, "two_level", 1, "jaxlowbit::Super", U8)           \
  TYPE(kInt32, "int32", 4, "int", S32)

#define JAXLOWBIT_ENUMERATOR(enumerator, name, bytes, device_type, xla_type) enumerator,
enum class ElementType { JAXLOWBIT_ELEMENT_TYPES(JAXLOWBIT_ENUMERATOR) };
#undef JAXLOWBIT_ENUMERATOR
// 8-bit type that a product rounds its lhs to.
enum class Rounding { kNone, kInt8, kE4m3 };
enum class ZeroKind { kNone, kInteger, kFloat };

// Activations: enumerator, name, and the formula of x on vectors of the CPU (cpu/clone/rows.inc). kernels/epilogue.cuh
// computes the same functions.
#define JAXLOWBIT_ACTIVATIONS(ACTIVATION)                                                    \
  ACTIVATION(kNone, "none", x)                                                               \
  ACTIVATION(kSilu, "silu", Sigmoid(x) * x)                                                  \
  ACTIVATION(kGelu, "gelu", Phi(x) * x)                                                      \
  ACTIVATION(kGeluTanh, "gelu_tanh", Sigmoid(1.59576912f * (x + 0.044715f * x * x * x)) * x) \
  ACTIVATION(kRelu, "relu", x < Vec{} ? Vec{} : x)                                           \
  ACTIVATION(kGptOss, "gpt_oss", Sigmoid(1.702f * Below(x)) * Below(x))

// kGptOss clamps the gate from above and up from both sides, and adds 1 to up. https://github.com/openai/gpt-oss
inline constexpr float kGptOssLimit = 7;

#define JAXLOWBIT_ENUMERATOR(enumerator, name, formula) enumerator,
enum class Activation { JAXLOWBIT_ACTIVATIONS(JAXLOWBIT_ENUMERATOR) };
#undef JAXLOWBIT_ENUMERATOR

// Names of types and activations in Python and the driver, in enum order.
#define JAXLOWBIT_NAME(enumerator, name, bytes, device_type, xla_type) name,
inline constexpr const char* kElementTypeNames[] = {JAXLOWBIT_ELEMENT_TYPES(JAXLOWBIT_NAME)};
#undef JAXLOWBIT_NAME
inline constexpr int kNumElementTypes = sizeof(kElementTypeNames) / sizeof(*kElementTypeNames);
inline constexpr const char* kRoundingNames[] = {"none", "int8", "float8_e4m3fn"};
inline constexpr const char* kZeroKindNames[] = {"none", "integer", "float"};
#define JAXLOWBIT_NAME(enumerator, name, formula) name,
inline constexpr const char* kActivationNames[] = {JAXLOWBIT_ACTIVATIONS(JAXLOWBIT_NAME)};
#undef JAXLOWBIT_NAME

// Names of codebooks, in enum order.
#define JAXLOWBIT_NAME(enumerator, name, bits, exponent_bits, cost) name,
inline constexpr const char* kCodebookNames[] = {JAXLOWBIT_CODEBOOKS(JAXLOWBIT_NAME)};
#undef JAXLOWBIT_NAME
inline constexpr int kNumCodebooks = sizeof(kCodebookNames) / sizeof(*kCodebookNames);

// The width of a codebook, 0 for kNone and kTable.
JAXLOWBIT_HOST_DEVICE constexpr int BitsOf(Codebook codebook) {
#define JAXLOWBIT_BITS(enumerator, name, bits, exponent_bits, cost) bits,
  constexpr int kBits[] = {JAXLOWBIT_CODEBOOKS(JAXLOWBIT_BITS)};
#undef JAXLOWBIT_BITS
  return kBits[static_cast<int>(codebook)];
}

JAXLOWBIT_HOST_DEVICE constexpr int64_t SizeOf(ElementType type) {
#define JAXLOWBIT_BYTES(enumerator, name, bytes, device_type, xla_type) bytes,
  constexpr int kBytes[] = {JAXLOWBIT_ELEMENT_TYPES(JAXLOWBIT_BYTES)};
#undef JAXLOWBIT_BYTES
  return kBytes[static_cast<int>(type)];
}
JAXLOWBIT_HOST_DEVICE constexpr bool Is8Bit(ElementType type) { return SizeOf(type) == 1; }
// Whether scales of a type have two levels: a byte per group, and floats per super-block.
constexpr bool HasTwoLevels(ElementType type) { return type == ElementType::kSuper; }
JAXLOWBIT_HOST_DEVICE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxlowbit
