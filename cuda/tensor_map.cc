// SPDX-License-Identifier: Apache-2.0

#include "cuda/tensor_map.h"

namespace jaxlowbit {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);
Encoder encoder = nullptr;

}  // namespace

// Asked of the runtime, so that the library needs no driver where it only compiles programs.
cudaError_t InitializeTensorMaps() {
  constexpr unsigned kVersion = 12000;  // of CUDA, that brought the encoder
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
                           int box_rows, int box_blocks, CUtensorMap* map) {
  constexpr int64_t kBytes = 2;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[] = {size(kAtom), size(rows), size(columns / kAtom)};
  const cuuint64_t strides[] = {size(columns * kBytes), size(kAtom * kBytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kAtom), static_cast<cuuint32_t>(box_rows),
                            static_cast<cuuint32_t>(box_blocks)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encoder(map,
              type == ElementType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
              3, const_cast<void*>(matrix), sizes, strides, box, steps,
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxlowbit
