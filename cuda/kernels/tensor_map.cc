// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/tensor_map.h"

#include <algorithm>
#include <array>

namespace jaxlowbit {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);
Encoder encoder = nullptr;

constexpr int64_t kElementBytes = 2;

// Encodes a tensor map; axes are innermost first. `axis_strides`: byte strides of all axes but the innermost.
template <size_t kAxes>
cudaError_t Describe(const void* array, ElementType type, const std::array<int64_t, kAxes>& axes,
                     const std::array<int64_t, kAxes - 1>& axis_strides,
                     const std::array<int64_t, kAxes>& tile_axes, CUtensorMapSwizzle swizzle,
                     CUtensorMap* map) {
  cuuint64_t sizes[kAxes], strides[kAxes - 1];
  cuuint32_t tile[kAxes], steps[kAxes];
  std::copy(axes.begin(), axes.end(), sizes);
  std::copy(axis_strides.begin(), axis_strides.end(), strides);
  std::copy(tile_axes.begin(), tile_axes.end(), tile);
  std::fill_n(steps, kAxes, 1);
  const CUresult result = encoder(
      map,
      type == ElementType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      kAxes, const_cast<void*>(array), sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
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

cudaError_t DescribeMatrix(const void* matrix, ElementType type, int64_t rows, int64_t columns,
                           int tile_rows, int tile_blocks, CUtensorMap* map) {
  return Describe<3>(matrix, type, {kAtom, rows, columns / kAtom},
                     {columns * kElementBytes, kAtom * kElementBytes},
                     {kAtom, tile_rows, tile_blocks},
                     tile_rows == 1 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, map);
}

cudaError_t DescribeMatrices(const void* matrices, ElementType type, int64_t batch, int64_t rows,
                             int64_t columns, int tile_rows, CUtensorMap* map) {
  return Describe<3>(matrices, type, {columns, rows, batch},
                     {columns * kElementBytes, rows * columns * kElementBytes},
                     {kAtom, tile_rows, 1}, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

cudaError_t DescribeBlocks(const void* matrices, ElementType type, const Matrices& of,
                           int tile_rows, int tile_blocks, CUtensorMap* map) {
  const bool in_blocks = of.blocks > 1;
  const int64_t row_bytes = of.columns * kElementBytes;
  const int64_t matrix_bytes = of.rows * row_bytes;
  return Describe<4>(matrices, type, {in_blocks ? kAtom : of.columns, of.rows, of.blocks, of.batch},
                     {row_bytes, in_blocks ? kAtom * kElementBytes : matrix_bytes, matrix_bytes},
                     {kAtom, tile_rows, tile_blocks, 1}, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

cudaError_t DescribeRows(const void* data, const Rows& of, int tile_rows, int tile_batch,
                         bool swizzled, CUtensorMap* map) {
  const int64_t elements = of.bytes / kElementBytes;
  return Describe<3>(data, ElementType::kBf16, {elements, of.rows, of.batch},
                     {of.bytes, of.rows * of.bytes}, {elements, tile_rows, tile_batch},
                     swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, map);
}

}  // namespace jaxlowbit
