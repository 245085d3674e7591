// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps: TMA descriptors of matrices in global memory, sm_90 and up.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Finds cuTensorMapEncodeTiled. Call once, before Encode.
cudaError_t InitializeTensorMaps();

// A tensor map without its pointer. Axes are innermost first.
struct TensorShape {
  ElementType type = ElementType::kBf16;
  uint32_t axes = 0;
  cuuint64_t sizes[4] = {}, strides[3] = {};  // byte strides of all axes but the innermost
  cuuint32_t tile[4] = {};
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

// Encodes the tensor map of data with this shape; nothing for a shape without axes.
cudaError_t Encode(const TensorShape& shape, const void* data, CUtensorMap* map);

// Row-major bf16 or f16 matrix as blocks of 64 columns: axes (column in block, row, block), tiles of 64 x `tile_rows` x
// `tile_blocks`. Requires columns % 64 == 0. A tile row is 128 bytes of shared memory with 128B swizzle: 16-byte chunk
// c is stored at c ^ (row % 8), so ldmatrix of 8 rows has no bank conflicts. Tiles of one row are not swizzled.
TensorShape ShapeOfMatrix(ElementType type, int64_t rows, int64_t columns, int tile_rows,
                          int tile_blocks);

// `batch` row-major matrices: axes (column, row, matrix), tiles of 64 x `tile_rows` x 1, swizzled likewise. Requires
// SupportsTma(columns).
TensorShape ShapeOfMatrices(ElementType type, int64_t batch, int64_t rows, int64_t columns,
                            int tile_rows);

// Batch of row-major bf16 or f16 matrices.
struct Matrices {
  int64_t batch, blocks, rows, columns;  // blocks: 1, or columns / 64
};

// Axes (column in block, row, block, matrix), tiles of 64 x `tile_rows` x `tile_blocks` x 1, swizzled likewise.
TensorShape ShapeOfBlocks(ElementType type, const Matrices& of, int tile_rows, int tile_blocks);

// Batch of rows of bytes; a row is a multiple of 16 bytes.
struct Rows {
  int64_t batch, rows, bytes;
};

// Axes (16-bit element, row, batch), tiles of a row x `tile_rows` x `tile_batch`. For any data.
TensorShape ShapeOfRows(const Rows& of, int tile_rows, int tile_batch, bool swizzled);

// Whether the row stride of this many 16-bit elements is a multiple of 16 bytes, as TMA requires.
constexpr bool SupportsTma(int64_t columns) { return columns % 8 == 0; }

}  // namespace jaxlowbit
