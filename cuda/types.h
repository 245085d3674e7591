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

// 8-bit scales: kE8m0 (powers of two), kE4m3, kInt8, kSuper (bytes of two-level scales). Quantized activations: kE4m3,
// kInt8. Results of integer matmuls: kInt32.
enum class ElementType { kF32, kBf16, kF16, kE8m0, kE4m3, kInt8, kSuper, kInt32 };
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
inline constexpr const char* kElementTypeNames[] = {
    "float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn", "int8", "uint8", "int32"};
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

JAXLOWBIT_HOST_DEVICE constexpr bool Is8Bit(ElementType type) {
  return type == ElementType::kE8m0 || type == ElementType::kE4m3 || type == ElementType::kInt8 ||
         type == ElementType::kSuper;
}
JAXLOWBIT_HOST_DEVICE constexpr int64_t SizeOf(ElementType type) {
  return type == ElementType::kF32 || type == ElementType::kInt32 ? 4 : Is8Bit(type) ? 1 : 2;
}
JAXLOWBIT_HOST_DEVICE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxlowbit
