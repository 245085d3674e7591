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

struct Extent {
  const void* data = nullptr;
  int64_t bytes = 0;
};

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

inline Extent LhsExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.lhs, p.batch * p.m * p.lhs_columns() * SizeOf(p.lhs)};
}
inline Extent LhsScaleExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.lhs_scale, b.lhs_scale == nullptr ? 0 : p.batch * p.m * 4};
}
inline Extent PackedExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.packed, p.num_weights * PackedBytes(p)};
}
inline Extent ScaleExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.scale, p.num_weights * GroupValues(p) * p.scale_bytes()};
}
inline Extent ZeroExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.zero, p.num_weights * GroupValues(p) * p.zero_bytes()};
}
inline Extent UnitExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.unit, p.num_weights * p.epilogue.units * 4};
}
inline Extent PermutationExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.permutation, b.permutation == nullptr ? 0 : p.k * 4};
}
inline Extent OutExtent(const QuantizedMatmul& p, const Buffers& b) {
  return {b.out, p.batch * p.m * p.out_columns() * SizeOf(p.out)};
}

// Everything that a product reads, except a residual at exactly the address of out: the thread that overwrites an
// element of such a residual also reads it.
inline std::array<Extent, 12> OperandExtents(const QuantizedMatmul& p, const Buffers& b) {
  const Epilogue& e = p.epilogue;
  const int64_t weights = p.batch * p.weights_per_element();
  const bool in_place = b.residual == b.out && e.residual == p.out;
  const auto or_none = [](const void* data, int64_t bytes) {
    return Extent{data, data == nullptr ? 0 : bytes};
  };
  return {LhsExtent(p, b),
          PackedExtent(p, b),
          ScaleExtent(p, b),
          ZeroExtent(p, b),
          PermutationExtent(p, b),
          or_none(b.index, weights * 4),
          or_none(b.group_sizes, p.groups_of_rows * 4),
          or_none(b.group_offset, 4),
          or_none(b.bias, p.biases() * p.n * SizeOf(e.bias)),
          or_none(in_place ? nullptr : b.residual, p.batch * p.m * p.n * SizeOf(e.residual)),
          LhsScaleExtent(p, b),
          UnitExtent(p, b)};
}

// Advances the buffers to weight number `first`.
inline void SkipWeights(const QuantizedMatmul& p, int64_t first, Buffers* b) {
  b->packed = Offset(b->packed, first * PackedBytes(p));
  b->scale = Offset(b->scale, first * GroupValues(p) * p.scale_bytes());
  b->zero = Offset(b->zero, first * GroupValues(p) * p.zero_bytes());
  b->unit = Offset(b->unit, first * p.epilogue.units * 4);
}

// Advances the buffers to row number `first`, counted over the whole batch.
inline void SkipRows(const QuantizedMatmul& p, int64_t first, Buffers* b) {
  b->lhs = Offset(b->lhs, first * p.lhs_columns() * SizeOf(p.lhs));
  b->lhs_scale = Offset(b->lhs_scale, first * 4);
  b->gathered = Offset(b->gathered, first * p.lhs_columns() * SizeOf(p.lhs));
  b->out = Offset(b->out, first * p.out_columns() * SizeOf(p.out));
  b->residual = Offset(b->residual, first * p.out_columns() * SizeOf(p.epilogue.residual));
}

// The product of `count` batch elements, from `first` on.
inline Operands BatchPart(const Operands& whole, int64_t first, int64_t count) {
  Operands part = whole;
  QuantizedMatmul& p = part.problem;
  Buffers& b = part.buffers;
  const int64_t weights = first * p.weights_per_element();
  SkipRows(p, first * p.m, &b);
  b.bias = Offset(b.bias, weights * p.n * SizeOf(p.epilogue.bias));
  p.batch = count;
  if (b.index != nullptr) {
    b.index += weights;
  } else if (p.num_weights > 1) {
    SkipWeights(p, weights, &b);
    p.num_weights = count * p.weights_per_element();
  }
  return part;
}

// The product of `count` rows, from `first` on, of a batch of one.
inline Operands RowPart(const Operands& whole, int64_t first, int64_t count) {
  Operands part = whole;
  SkipRows(whole.problem, first, &part.buffers);
  part.problem.m = count;
  return part;
}

}  // namespace jaxlowbit
