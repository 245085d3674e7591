// SPDX-License-Identifier: Apache-2.0
//
// A problem with random data on the GPU, and its exact answer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/problem.h"

namespace jaxlowbit::check {

// Exits with the names of the call and of the error if there is one.
void Check(cudaError_t error, const char* what);

// Device memory, freed with its owner.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Bytes of packed weights, scales and zeros that one call reads.
int64_t WeightBytes(const QuantizedMatmul& problem);

// Optional operands.
struct Optional {
  bool index = false, bias = false, residual = false;
};

// Number of units per weight: 1 with e4m3 scales, one per channel with int8 scales, padded to strips with an 8-bit lhs.
int64_t UnitsOf(const QuantizedMatmul& problem);

// The groups of the rows of a ragged problem, on the device. Kernels read `numbers` (Buffers::group_sizes), and the
// reference reads `weights`: one for each row, or two if gated.
struct RowGroups {
  const int32_t *numbers = nullptr, *weights = nullptr;
};

// Random operands for `problem`, with `copies` sets of weights, so that a timing can keep them out of L2. A ragged
// problem has no bias.
class DeviceProblem {
 public:
  DeviceProblem(const QuantizedMatmul& problem, const Optional& optional, int copies, uint64_t seed,
                const RowGroups& groups = {});

  // The buffers of one call that uses weight set `copy`.
  Buffers buffers(int copy) const;
  int64_t workspace_bytes() const { return workspace_.bytes(); }
  const Optional& optional() const { return optional_; }

  // Fills out and workspace with NaN patterns, to detect unwritten elements.
  void Poison() const;
  // Maximum ratio of error to bound over out; NaN counts as infinite. If out has more than `max_samples` elements,
  // checks between half and twice as many, spread over rows and columns.
  double ErrorOverBound(int copy, int64_t max_samples) const;
  // A hash of the bits of out; two different results have the same hash with probability 2^-32.
  uint64_t Digest() const;

 private:
  QuantizedMatmul problem_;
  Optional optional_;
  RowGroups groups_;
  std::vector<float> codebook_;  // its numbers; empty for integers
  DeviceBuffer numbers_;         // codebook_ on the GPU
  DeviceBuffer lhs_, lhs_scale_, packed_, scale_, unit_, zero_, index_, permutation_, gathered_,
      bias_, residual_, out_, workspace_;
  int64_t packed_stride_, scale_stride_, zero_stride_;  // bytes of one set
};

std::string Describe(const QuantizedMatmul& problem, const Optional& optional);

}  // namespace jaxlowbit::check
