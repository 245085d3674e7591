// SPDX-License-Identifier: Apache-2.0
//
// The schedule of dense, batched and indexed products: the rows and the weights of each batch element.
//
// Kernels get this struct from ScheduleOf(params). A grouped product (ragged rows) would use another struct with the
// same members, where element e is group e:
//
//   Rows(e)             number of rows of e
//   Has(e, m)           whether row m belongs to e
//   Row(e, m)           global index of row m of e, in lhs, residual and out
//   Position(e, strip)  position of a weight in the batch, which selects its bias and unit and, by WeightAt, the packed
//                       weight. Gated: even strips belong to the gate, odd ones to up.
//   UpPosition(e)       gated: the position of up
//
// The order of tiles is in order.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/schedule/weight_number.h"

namespace jaxlowbit {

// Number of the packed weight at `position`: index[position], or without an index min(position, num_weights - 1).
template <typename Int>
__device__ int64_t WeightAt(const int32_t* index, const int64_t& num_weights, Int position) {
  return WeightNumber(index == nullptr ? position : index[position], num_weights);
}

// Int: type of elements and rows, int or int64_t. kMayBeGated: the instance supports gated products. Members are
// references to kernel parameters, since copies would occupy registers from the start.
template <typename Int, bool kMayBeGated = true>
struct Batched {
  const Int& rows;  // of each element
  const bool& gated;

  __device__ const Int& Rows(Int /*element*/) const { return rows; }
  __device__ bool Has(Int /*element*/, Int m) const { return m < rows; }
  __device__ int64_t Row(Int element, Int m) const { return int64_t{element} * rows + m; }
  __device__ Int Position(Int element, int strip = 0) const {
    return kMayBeGated && gated ? 2 * element + strip % 2 : element;
  }
  __device__ Int UpPosition(Int element) const { return 2 * element + 1; }
};

}  // namespace jaxlowbit
