// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/tensor_map.h"

#include <algorithm>
#include <array>

namespace jaxlowbit {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);
Encoder encoder = nullptr;

constexpr int64_t kElementBytes = 2;

// Describes an array of three axes, the innermost first. `axis_strides`: bytes, of the outer two.
cudaError_t Describe(const void* array, ElementType type, const std::array<int64_t, 3>& axes,
                     const std::array<int64_t, 2>& axis_strides,
                     const std::array<int64_t, 3>& tile_axes, CUtensorMapSwizzle swizzle,
                     CUtensorMap* map) {
  cuuint64_t sizes[3], strides[2];
  cuuint32_t tile[3];
  std::copy(axes.begin(), axes.end(), sizes);
  std::copy(axis_strides.begin(), axis_strides.end(), strides);
  std::copy(tile_axes.begin(), tile_axes.end(), tile);
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encoder(
      map,
      type == ElementType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3, const_cast<void*>(array), sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

// Asks the runtime, so that the library needs no driver where it only compiles programs.
cudaError_t InitializeTensorMaps() {
  constexpr unsigned kVersion = 12000;  // the CUDA version that brought the encoder
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
  return Describe(matrix, type, {kAtom, rows, columns / kAtom},
                  {columns * kElementBytes, kAtom * kElementBytes}, {kAtom, tile_rows, tile_blocks},
                  tile_rows == 1 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, map);
}

cudaError_t DescribeMatrices(const void* matrices, ElementType type, int64_t batch, int64_t rows,
                             int64_t columns, int tile_rows, CUtensorMap* map, bool swizzled) {
  return Describe(matrices, type, {columns, rows, batch},
                  {columns * kElementBytes, rows * columns * kElementBytes}, {kAtom, tile_rows, 1},
                  swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, map);
}

}  // namespace jaxlowbit
