// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps: what TMA (sm_90 and up) has to know of a matrix in global memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Finds the driver's encoder. Call it once, before the others.
cudaError_t InitializeTensorMaps();

// Describes a row-major matrix of bf16 or f16 whose columns, a multiple of 64, are seen as blocks of 64: axes (column
// in the block, row, block), in tiles of 64 x `tile_rows` x `tile_blocks`. A row of a tile is 128 bytes of shared
// memory, whose chunk c of 16 bytes lies at c ^ (row % 8), so that eight rows of a column are in different banks.
// Tiles of one row are not swizzled.
cudaError_t DescribeMatrix(const void* matrix, ElementType type, int64_t rows, int64_t columns,
                           int tile_rows, int tile_blocks, CUtensorMap* map);

// Describes `batch` row-major matrices with a number of columns that TMA supports: axes (column, row, matrix), in tiles
// of 64 x `tile_rows` of one matrix, swizzled in the same way.
cudaError_t DescribeMatrices(const void* matrices, ElementType type, int64_t batch, int64_t rows,
                             int64_t columns, int tile_rows, CUtensorMap* map);

// Row-major matrices of bf16 or f16.
struct Matrices {
  int64_t batch, blocks, rows, columns;  // blocks: 1, or columns / 64
};

// Describes matrices in tiles of 64 x `tile_rows` x `tile_blocks`, swizzled in the same way: axes (column, row, block,
// matrix), where columns are those of a block if there are several, or one block has all.
cudaError_t DescribeBlocks(const void* matrices, ElementType type, const Matrices& of,
                           int tile_rows, int tile_blocks, CUtensorMap* map);

// Rows of bytes, multiples of 16.
struct Rows {
  int64_t batch, rows, bytes;
};

// Describes rows, whatever they hold, in tiles of `tile_rows` of each of `tile_batch`: axes (16 bits, row, batch).
cudaError_t DescribeRows(const void* data, const Rows& of, int tile_rows, int tile_batch,
                         bool swizzled, CUtensorMap* map);

// Whether rows of this many 16-bit elements begin where TMA can load them.
constexpr bool SupportsTma(int64_t columns) { return columns % 8 == 0; }

}  // namespace jaxlowbit
