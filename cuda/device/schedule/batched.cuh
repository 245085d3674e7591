// SPDX-License-Identifier: Apache-2.0
//
// The schedule of dense, batched and indexed products: the rows and the weights of each batch element.
//
// Kernels ask ScheduleOf(params) for this and compute none of it themselves. A product of groups of rows is another
// struct with the same members; its element e is group e:
//
//   Rows(e)             number of rows of e
//   Row(e, m)           row m of e, counted over all elements: the row of lhs, of the residual and of out
//   Position(e, strip)  position of a weight in the batch: the index of its bias and unit, and, by WeightAt, of the
//                       packed weight. In a gated product even strips are the gate's, odd ones up's.
//   UpPosition(e)       the position of up, in a gated product
//
// The order of tiles is in order.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/schedule/weight_number.h"

namespace jaxlowbit {

// The number of the packed weight at `position`. A null index names weight `position`, or the last one if there are
// fewer.
template <typename Int>
__device__ int64_t WeightAt(const int32_t* index, const int64_t& num_weights, Int position) {
  return WeightNumber(index == nullptr ? position : index[position], num_weights);
}

// Int: the type of elements and rows, int or int64_t. kMayBeGated: gated products exist for this instance. Members
// refer to the kernel's parameters, so that each use reads them: copies would occupy registers from the start.
template <typename Int, bool kMayBeGated = true>
struct Batched {
  const Int& rows;  // of each element
  const bool& gated;

  __device__ const Int& Rows(Int /*element*/) const { return rows; }
  __device__ int64_t Row(Int element, Int m) const { return int64_t{element} * rows + m; }
  __device__ Int Position(Int element, int strip = 0) const {
    return kMayBeGated && gated ? 2 * element + strip % 2 : element;
  }
  __device__ Int UpPosition(Int element) const { return 2 * element + 1; }
};

}  // namespace jaxlowbit
