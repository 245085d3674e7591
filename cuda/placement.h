// SPDX-License-Identifier: Apache-2.0
//
// XLA may give a call pointers into larger buffers: a result may lie over an operand, and both may begin at any
// element (docs/custom_calls.md). Kernels store results while others of their CTAs still read, and most copy 16
// bytes at a time from multiples of 16. So a result that overlaps what is still to be read goes to the workspace
// first, and an operand that begins elsewhere is copied there. A call with neither pays a few comparisons.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/extents.h"
#include "cuda/problem.h"

namespace jaxlowbit {

class Placement {
 public:
  // Has the end of the workspace, as far as it is needed; `bytes` and `workspace` are then of what is left.
  Placement(void* workspace, int64_t bytes, cudaStream_t stream)
      : workspace_(workspace), bytes_(bytes), stream_(stream) {}

  void* workspace() const { return workspace_; }
  int64_t bytes() const { return bytes_; }

  // Where to write a result of so many bytes that belongs to `result`: in the workspace until Finish. Null without
  // room.
  void* Redirect(void* result, int64_t bytes);

  // Redirects what `products` of one call write over operands or results of any of them.
  void RedirectResults(Operands* products, size_t count);

  // Copies what a product reads and is not aligned, as far as there is room, and notes what is.
  void Align(Operands* product);

  // A copy of an operand that is not aligned; itself if it is. Null without room.
  const void* Aligned(const Extent& operand);

  bool copied() const { return copied_; }

  // Writes redirected results where they belong, in their order. Returns the first error of all copies.
  cudaError_t Finish();

 private:
  struct Result {
    void* from;
    void* to;
    int64_t bytes;
  };

  void* Take(int64_t bytes);
  void Copy(const void* from, void* to, int64_t bytes);

  void* workspace_;
  int64_t bytes_;
  cudaStream_t stream_;
  std::vector<Result> results_;
  bool copied_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Bytes of workspace that redirected results of these products take.
int64_t RedirectedBytes(const Operands* products, size_t count);

// Loads the kernel that copies.
cudaError_t InitializePlacement();

}  // namespace jaxlowbit
