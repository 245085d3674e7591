// SPDX-License-Identifier: Apache-2.0
//
// Extents of a product's buffers in memory, and the buffers of parts of a product.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Size and alignment of the loads of most kernels.
inline constexpr int64_t kAlignment = 16;

// Alignment of buffers that Placement puts into the workspace.
inline constexpr int64_t kPlaceAlignment = 128;

inline bool IsAligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0;
}

// The pointer plus `bytes`; null stays null.
template <typename T>
T* Offset(T* data, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return data == nullptr ? nullptr : reinterpret_cast<T*>(address + bytes);
}

template <typename Pointer>
struct BasicExtent {
  Pointer data = {};
  int64_t bytes = 0;
};
using Extent = BasicExtent<const void*>;

inline Extent MakeExtent(const void* data, int64_t bytes) { return {data, bytes}; }

inline bool Overlap(const Extent& a, const Extent& b) {
  const auto begin = [](const Extent& x) { return reinterpret_cast<uintptr_t>(x.data); };
  return a.bytes > 0 && b.bytes > 0 && begin(a) < begin(b) + b.bytes &&
         begin(b) < begin(a) + a.bytes;
}

inline int64_t PackedBytes(const QuantizedMatmul& p) {
  return p.n_blocks() * p.k_blocks() * p.words_per_atom() * 4;
}
inline int64_t GroupValues(const QuantizedMatmul& p) {
  return p.n_blocks() * p.scale_rows() * kAtom;
}

// Here and below, `B` is a BasicBuffers.
template <typename B>
auto LhsExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.lhs, p.batch * p.lhs_rows() * p.lhs_columns() * SizeOf(p.lhs));
}
template <typename B>
auto PackedExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.packed, p.num_weights * PackedBytes(p));
}
template <typename B>
auto ScaleExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.scale, p.num_weights * GroupValues(p) * p.scale_bytes());
}
template <typename B>
auto ZeroExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.zero, p.num_weights * GroupValues(p) * p.zero_bytes());
}
template <typename B>
auto UnitExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.unit, p.num_weights * p.epilogue.units * 4);
}
template <typename B>
auto PermutationExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.permutation, b.permutation == nullptr ? 0 : p.k * 4);
}
template <typename B>
auto OutExtent(const QuantizedMatmul& p, const B& b) {
  return MakeExtent(b.out, p.batch * p.m * p.out_columns() * SizeOf(p.out));
}

// Everything that a product reads, except a residual `in_place`, at exactly the address of out: the thread that
// overwrites an element of such a residual also reads it.
template <typename B>
auto OperandExtents(const QuantizedMatmul& p, const B& b, bool in_place) {
  const Epilogue& e = p.epilogue;
  const int64_t rows = p.batch * p.m, weights = p.batch * p.weights_per_element();
  const auto or_none = [](const auto& data, int64_t bytes) {
    return MakeExtent(data, data == nullptr ? 0 : bytes);
  };
  const bool overwritten = in_place && e.residual == p.out;
  return std::array{LhsExtent(p, b),
                    PackedExtent(p, b),
                    ScaleExtent(p, b),
                    ZeroExtent(p, b),
                    PermutationExtent(p, b),
                    or_none(b.index, weights * 4),
                    or_none(b.group_sizes, p.group_numbers() * 4),
                    or_none(b.group_offset, 4),
                    or_none(b.bias, p.biases() * p.n * SizeOf(e.bias)),
                    or_none(b.residual, overwritten ? 0 : rows * p.n * SizeOf(e.residual)),
                    or_none(b.lhs_scale, rows * 4),
                    UnitExtent(p, b)};
}
inline auto OperandExtents(const QuantizedMatmul& p, const Buffers& b) {
  return OperandExtents(p, b, b.residual == b.out);
}

// Advances the buffers to weight number `first`.
template <typename B>
void SkipWeights(const QuantizedMatmul& p, int64_t first, B* b) {
  b->packed = Offset(b->packed, first * PackedBytes(p));
  b->scale = Offset(b->scale, first * GroupValues(p) * p.scale_bytes());
  b->zero = Offset(b->zero, first * GroupValues(p) * p.zero_bytes());
  b->unit = Offset(b->unit, first * p.epilogue.units * 4);
}

// Advances the buffers to row number `first`, counted over the whole batch.
template <typename B>
void SkipRows(const QuantizedMatmul& p, int64_t first, B* b) {
  b->lhs = Offset(b->lhs, first * p.lhs_columns() * SizeOf(p.lhs));
  b->lhs_scale = Offset(b->lhs_scale, first * 4);
  b->gathered = Offset(b->gathered, first * p.lhs_columns() * SizeOf(p.lhs));
  b->out = Offset(b->out, first * p.out_columns() * SizeOf(p.out));
  b->residual = Offset(b->residual, first * p.out_columns() * SizeOf(p.epilogue.residual));
}

// The product of `count` batch elements, from `first` on. `Product`: Operands, or the same with addresses.
template <typename Product>
Product BatchPart(const Product& whole, int64_t first, int64_t count) {
  Product part = whole;
  auto& [p, b] = part;
  const int64_t weights = first * p.weights_per_element();
  SkipRows(p, first * p.m, &b);
  b.bias = Offset(b.bias, weights * p.n * SizeOf(p.epilogue.bias));
  p.batch = count;
  if (b.index != nullptr) {
    b.index = Offset(b.index, weights * 4);
  } else if (p.num_weights > 1) {
    SkipWeights(p, weights, &b);
    p.num_weights = count * p.weights_per_element();
  }
  return part;
}

// The product of `count` rows, from `first` on, of a batch of one.
template <typename Product>
Product RowPart(const Product& whole, int64_t first, int64_t count) {
  Product part = whole;
  SkipRows(whole.problem, first, &part.buffers);
  part.problem.m = count;
  return part;
}

}  // namespace jaxlowbit
