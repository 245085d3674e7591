// SPDX-License-Identifier: Apache-2.0
//
// Ragged products on the host: sizes of groups are known only on the device, so plans and costs assume a dense batch of
// blocks of rows (device/schedule/ragged.cuh).
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Blocks of `block_m` rows if every row chooses its group at random.
int64_t ExpectedBlocks(const QuantizedMatmul& problem, int block_m);

// Maximum number of blocks for any sizes.
int64_t MaxBlocks(const QuantizedMatmul& problem, int block_m);

// Bytes of the table of groups in shared memory (RaggedTable).
int GroupTableBytes(const QuantizedMatmul& problem);

// The batch of blocks of `block_m` rows whose plan and cost represent a ragged product; a dense product itself.
QuantizedMatmul BlocksOf(const QuantizedMatmul& problem, int block_m);

}  // namespace jaxlowbit
