// SPDX-License-Identifier: Apache-2.0
//
// Ragged products on the host: sizes of groups are known only on the device, so plans and costs assume a dense batch of
// blocks of rows (device/schedule/ragged.cuh).
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Whether no two rows of a ragged product share a CTA, in a dense launch (device/schedule/listed.cuh): the rows of a list,
// and blocks of one row.
inline bool HasOwnCtas(const QuantizedMatmul& problem, int block_m) {
  return problem.is_ragged() && (problem.listed_per_row > 0 || block_m == 1);
}

// Whether a problem is BlocksOf a ragged product whose CTAs are persistent.
inline constexpr int64_t kOfBlocks = -1;  // for groups_of_rows
inline bool IsOfBlocks(const QuantizedMatmul& problem) {
  return problem.groups_of_rows == kOfBlocks;
}

// Blocks of `block_m` rows of the experts here if every row chooses its expert at random.
int64_t ExpectedBlocks(const QuantizedMatmul& problem, int block_m);

// Maximum number of blocks for any sizes.
int64_t MaxBlocks(const QuantizedMatmul& problem, int block_m);

// Bytes of the table of groups in shared memory (RaggedTable).
int GroupTableBytes(const QuantizedMatmul& problem);

// The batch of blocks of `block_m` rows whose plan and cost represent a ragged product; a dense product itself.
QuantizedMatmul BlocksOf(const QuantizedMatmul& problem, int block_m);

}  // namespace jaxlowbit
