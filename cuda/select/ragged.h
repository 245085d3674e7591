// SPDX-License-Identifier: Apache-2.0
//
// Ragged products on the host: sizes of groups are known only on the device, so plans and costs assume a dense batch of
// blocks of rows (device/schedule/ragged.cuh).
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Whether a ragged product has the sizes of its groups, not a list of the groups of its rows.
inline bool HasSizes(const QuantizedMatmul& problem) {
  return problem.is_ragged() && problem.listed_per_row == 0;
}

// Whether a problem is BlocksOf a ragged product with sizes.
inline constexpr int64_t kOfBlocks = -1;  // for groups_of_rows
inline bool IsOfBlocks(const QuantizedMatmul& problem) {
  return problem.groups_of_rows == kOfBlocks;
}

// Blocks of `block_m` rows if every row chooses its group at random.
int64_t ExpectedBlocks(const QuantizedMatmul& problem, int block_m);

// Maximum number of blocks for any sizes.
int64_t MaxBlocks(const QuantizedMatmul& problem, int block_m);

// Bytes of the table of groups in shared memory (RaggedTable).
int GroupTableBytes(const QuantizedMatmul& problem);

// The batch of blocks of `block_m` rows whose plan and cost represent a ragged product; a dense product itself.
QuantizedMatmul BlocksOf(const QuantizedMatmul& problem, int block_m);

}  // namespace jaxlowbit
