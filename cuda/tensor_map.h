// SPDX-License-Identifier: Apache-2.0
//
// Descriptions of matrices for the copy engine of sm_90 and up.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Finds the driver's encoder. Once, before DescribeMatrix.
cudaError_t InitializeTensorMaps();

// Boxes of `box_rows` x 64 elements x `box_blocks` of a row-major matrix of bf16 or f16 whose columns,
// a multiple of 64, are seen as blocks of 64: axes (column in the block, row, block). A row of a box
// is 128 bytes of shared memory, whose chunk c of 16 bytes lies at c ^ (i % 8) in row i of all blocks, so
// that up to eight rows of a column are in different banks.
cudaError_t DescribeMatrix(const void* matrix, ElementType type, int64_t rows, int64_t columns,
                           int box_rows, int box_blocks, CUtensorMap* map);

// The same of `batch` such matrices with any number of columns: boxes of `box_rows` x 64 elements of
// one matrix, axes (column, row, matrix). Needs SupportsBoxes.
cudaError_t DescribeMatrices(const void* matrices, ElementType type, int64_t batch, int64_t rows,
                             int64_t columns, int box_rows, CUtensorMap* map);

// Whether rows of this many 16-bit elements begin where the copy engine can.
constexpr bool SupportsBoxes(int64_t columns) { return columns % 8 == 0; }

}  // namespace jaxlowbit
