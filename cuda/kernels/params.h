// SPDX-License-Identifier: Apache-2.0
//
// Fills kernel parameters shared by all launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "cuda/device/divide.cuh"
#include "cuda/device/format/codebook.cuh"
#include "cuda/device/schedule/ragged.cuh"
#include "cuda/kernels/epilogue.cuh"
#include "cuda/problem.h"

namespace jaxlowbit {

// Here and below: all but the pointers. `B`: Buffers or Addresses.
template <typename B>
EpilogueParams EpilogueOf(const QuantizedMatmul& problem, const B& buffers) {
  const Epilogue& e = problem.epilogue;
  const bool any = e.gated || e.activation != Activation::kNone || buffers.bias != nullptr ||
                   buffers.residual != nullptr || e.units > 0;
  return {
      nullptr, nullptr, e.bias == ElementType::kF32, e.residual == ElementType::kF32, e.activation,
      e.gated, any};
}

inline UnitParams UnitsOf(const QuantizedMatmul& problem) {
  return {nullptr, nullptr, problem.num_weights, problem.epilogue.units};
}

// Entries of a table codebook, repeated to fill the lanes of a warp; unspecified for other codebooks.
template <typename B>
TableParams TableOf(const QuantizedMatmul& problem, const B& buffers) {
  TableParams table = {};
  if (problem.codebook != Codebook::kTable) return table;
  for (size_t i = 0; i < std::size(table.numbers); ++i) {
    table.numbers[i] = buffers.codebook[i % (size_t{1} << problem.bits)];
  }
  return table;
}

inline Divider DivideBy(int64_t divisor) {
  return {static_cast<int>(divisor),
          static_cast<uint32_t>(((int64_t{1} << 31) + divisor - 1) / divisor)};  // rounded up
}

inline WideDivider WideDivideBy(int64_t divisor) {
  return {static_cast<int>(divisor), ((uint64_t{1} << 63) + static_cast<uint64_t>(divisor) - 1) /
                                         static_cast<uint64_t>(divisor)};
}

// `columns`: tiles along n.
inline RaggedParams RaggedOf(const QuantizedMatmul& problem, int block, int64_t columns) {
  return {nullptr,
          nullptr,
          static_cast<int>(problem.groups_of_rows),
          static_cast<int>(problem.experts()),
          static_cast<int>(problem.m),
          block,
          WideDivideBy(columns)};
}

// Atoms per group along k, and groups per atom; at least 1.
inline Divider AtomsPerGroup(const QuantizedMatmul& problem) {
  const int64_t size = problem.group_size, atoms = size / kAtom;
  return DivideBy(size < 0 ? problem.k_blocks() : atoms > 1 ? atoms : 1);
}
inline int GroupsPerAtom(const QuantizedMatmul& problem) {
  const int64_t size = problem.group_size;
  return size > 0 && size < kAtom ? static_cast<int>(kAtom / size) : 1;
}

}  // namespace jaxlowbit
