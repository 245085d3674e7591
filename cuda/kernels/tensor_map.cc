// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/tensor_map.h"

#include <algorithm>
#include <array>

namespace jaxlowbit {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);
Encoder encoder = nullptr;

constexpr int64_t kElementBytes = 2;

template <size_t kAxes>
TensorShape ShapeOf(ElementType type, const std::array<int64_t, kAxes>& sizes,
                    const std::array<int64_t, kAxes - 1>& strides,
                    const std::array<int64_t, kAxes>& tile, CUtensorMapSwizzle swizzle) {
  TensorShape shape;
  shape.type = type;
  shape.axes = kAxes;
  std::copy(sizes.begin(), sizes.end(), shape.sizes);
  std::copy(strides.begin(), strides.end(), shape.strides);
  std::copy(tile.begin(), tile.end(), shape.tile);
  shape.swizzle = swizzle;
  return shape;
}

}  // namespace

// Gets the entry point from the runtime, so the library does not link to libcuda: a machine that only compiles programs
// has no driver.
cudaError_t InitializeTensorMaps() {
  constexpr unsigned kVersion = 12000;  // first CUDA version with cuTensorMapEncodeTiled
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encoder = reinterpret_cast<Encoder>(found);
  return cudaSuccess;
}

cudaError_t Encode(const TensorShape& shape, const void* data, CUtensorMap* map) {
  if (shape.axes == 0) return cudaSuccess;
  constexpr cuuint32_t kSteps[4] = {1, 1, 1, 1};
  const CUresult result =
      encoder(map,
              shape.type == ElementType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
              shape.axes, const_cast<void*>(data), shape.sizes, shape.strides, shape.tile, kSteps,
              CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

TensorShape ShapeOfMatrix(ElementType type, int64_t rows, int64_t columns, int tile_rows,
                          int tile_blocks) {
  return ShapeOf<3>(type, {kAtom, rows, columns / kAtom},
                    {columns * kElementBytes, kAtom * kElementBytes},
                    {kAtom, tile_rows, tile_blocks},
                    tile_rows == 1 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
}

TensorShape ShapeOfMatrices(ElementType type, int64_t batch, int64_t rows, int64_t columns,
                            int tile_rows) {
  return ShapeOf<3>(type, {columns, rows, batch},
                    {columns * kElementBytes, rows * columns * kElementBytes},
                    {kAtom, tile_rows, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
}

TensorShape ShapeOfBlocks(ElementType type, const Matrices& of, int tile_rows, int tile_blocks) {
  const bool in_blocks = of.blocks > 1;
  const int64_t row_bytes = of.columns * kElementBytes;
  const int64_t matrix_bytes = of.rows * row_bytes;
  return ShapeOf<4>(type, {in_blocks ? kAtom : of.columns, of.rows, of.blocks, of.batch},
                    {row_bytes, in_blocks ? kAtom * kElementBytes : matrix_bytes, matrix_bytes},
                    {kAtom, tile_rows, tile_blocks, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
}

TensorShape ShapeOfRows(const Rows& of, int tile_rows, int tile_batch, bool swizzled) {
  const int64_t elements = of.bytes / kElementBytes;
  return ShapeOf<3>(ElementType::kBf16, {elements, of.rows, of.batch},
                    {of.bytes, of.rows * of.bytes}, {elements, tile_rows, tile_batch},
                    swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace jaxlowbit
