// SPDX-License-Identifier: Apache-2.0
//
// The description of a matmul: everything that kernel selection and launch depend on. Includes no XLA, Python or CUDA
// header, so the CPU kernel, the handlers, the driver and the tests share it.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Epilogue, in float32 before the result is rounded to the type of out: activation(unit * product + bias) + residual,
// or, gated, activation(unit * gate + bias) * (unit * up + bias) + residual. `unit` is the tensor scale of the weight,
// or the scale of a channel.
struct Epilogue {
#define JAXLOWBIT_EPILOGUE_FIELD(type, name, value) type name = value;
#include "cuda/product.def"
};

// out[b] = lhs[b] @ weight[index[b]] for b < batch, with lhs (m, k) and a packed (k, n) weight; or,
// transposed, out[b] = lhs[b] @ weight[index[b]]^T, with lhs (m, n).
struct QuantizedMatmul {
#define JAXLOWBIT_PRODUCT_FIELD(type, name, value) type name = value;
#include "cuda/product.def"
  Epilogue epilogue;
#define JAXLOWBIT_LAUNCH_FIELD(type, name, value) type name = value;
#include "cuda/product.def"

  // Type of scales, results, biases and residuals that are not float32: the type of lhs, or bf16 for an 8-bit lhs.
  JAXLOWBIT_HOST_DEVICE constexpr ElementType floats() const {
    return Is8Bit(lhs) ? ElementType::kBf16 : lhs;
  }
  JAXLOWBIT_HOST_DEVICE constexpr bool is_integer_matmul() const {
    return out == ElementType::kInt32;
  }
  // Whether to allow float16 accumulators. With 8-bit scales, weights times scales may overflow float16, since the
  // second scale is applied later, to the accumulators.
  constexpr bool may_accumulate_float16() const {
    return accumulate_float16 && lhs == ElementType::kF16 && !Is8Bit(scale);
  }
  constexpr int64_t lhs_columns() const { return transposed ? n : k; }
  constexpr int64_t out_columns() const { return transposed ? k : n; }
  constexpr int64_t n_blocks() const { return CeilDiv(n, kAtom); }
  // Weights that one batch element multiplies; strips (64 output channels) of all these weights.
  constexpr int64_t weights_per_element() const { return epilogue.gated ? 2 : 1; }
  constexpr bool is_ragged() const { return groups_of_rows > 0; }
  // Rows of lhs of a batch element.
  constexpr int64_t lhs_rows() const { return listed_per_row > 0 ? m / listed_per_row : m; }
  // Numbers in Buffers::group_sizes.
  constexpr int64_t group_numbers() const { return listed_per_row > 0 ? m : groups_of_rows; }
  // Weights, or gated pairs, of a ragged product.
  constexpr int64_t experts() const { return num_weights / weights_per_element(); }
  // Rows of a bias.
  constexpr int64_t biases() const {
    return is_ragged() ? num_weights : batch * weights_per_element();
  }
  constexpr int64_t strips() const { return weights_per_element() * n_blocks(); }
  constexpr int64_t k_blocks() const { return CeilDiv(k, kAtom); }
  constexpr int64_t groups() const {
    return group_size < 0 ? 1 : CeilDiv(k_blocks() * kAtom, group_size);
  }
  // Rows of 64 scales in a strip: one per group; for two-level scales, whole super-blocks.
  constexpr int64_t scale_rows() const {
    if (!HasTwoLevels(scale)) return groups();
    return CeilDiv(k_blocks() * kAtom, kSuperBlock) * (kSuperBlock / group_size + kFloatRows);
  }
  // Bytes of one scale and of one zero; 0 without zeros.
  constexpr int64_t scale_bytes() const { return SizeOf(scale); }
  constexpr int64_t zero_bytes() const {
    return zero == ZeroKind::kNone ? 0 : zero == ZeroKind::kInteger ? 1 : scale_bytes();
  }
  constexpr int64_t words_per_atom() const { return kAtom * kAtom * bits / 32; }
};

// Calls visit(name, field) for each field known at lowering.
template <typename Product, typename Visit>
constexpr void VisitRecord(Product& p, Visit visit) {
#define JAXLOWBIT_PRODUCT_FIELD(type, name, value) visit(#name, p.name);
#include "cuda/product.def"
#define JAXLOWBIT_EPILOGUE_FIELD(type, name, value) visit(#name, p.epilogue.name);
#include "cuda/product.def"
}

// Calls visit(name, field) for every field.
template <typename Product, typename Visit>
constexpr void VisitFields(Product& p, Visit visit) {
  VisitRecord(p, visit);
#define JAXLOWBIT_LAUNCH_FIELD(type, name, value) visit(#name, p.name);
#include "cuda/product.def"
}

inline constexpr int kRecordFields = [] {
  int count = 0;
  QuantizedMatmul problem;
  VisitRecord(problem, [&](const char*, auto&) { ++count; });
  return count;
}();
inline constexpr int kFields = [] {
  int count = 0;
  QuantizedMatmul problem;
  VisitFields(problem, [&](const char*, auto&) { ++count; });
  return count;
}();

// Whether this group size divides a super-block into several groups.
constexpr bool DividesSuperBlock(int64_t group_size) {
  return group_size > 0 && group_size < kSuperBlock && kSuperBlock % group_size == 0;
}

// Normalizes a group size for `k` rows to 32 bits: -1 if one group covers k. Group sizes in super-blocks are kept,
// since super-blocks are whole for any k.
constexpr int64_t GroupSize(int64_t size, int64_t k, ElementType scale) {
  if (HasTwoLevels(scale)) return size;
  return size >= CeilDiv(k, kAtom) * kAtom ? -1 : size;
}

// The buffers of one product (buffers.def). `Pointer<T>`: T*, or an address that is known at launch (plan.h).
template <template <typename> class Pointer>
struct BasicBuffers {
#define JAXLOWBIT_BUFFER(type, name) Pointer<type> name = {};
#include "cuda/buffers.def"
  const float* codebook = nullptr;  // [2^bits] in memory of the host; null: integers
};

template <typename T>
using RawPointer = T*;
using Buffers = BasicBuffers<RawPointer>;

// One product of a call.
struct Operands {
  QuantizedMatmul problem;
  Buffers buffers;
};

}  // namespace jaxlowbit
