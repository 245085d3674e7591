// SPDX-License-Identifier: Apache-2.0
//
// XLA may give a call pointers into larger buffers: a result may overlap an operand, and both may begin at any
// element (docs/custom_calls.md). A kernel stores results while others of its CTAs still read, and most kernels load 16
// bytes at a time from multiples of 16. So a result that overlaps what is still to be read goes to the workspace
// first, and an operand that is not aligned is copied there. A call with neither pays a few comparisons.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/extents.h"
#include "cuda/problem.h"

namespace jaxlowbit {

class Placement {
 public:
  // Takes what it needs from the end of the workspace; `bytes` and `workspace` are what is left. Without `copies` it
  // only finds places.
  Placement(void* workspace, int64_t bytes, cudaStream_t stream, bool copies = true)
      : workspace_(workspace), bytes_(bytes), stream_(stream), copies_(copies) {}

  void* workspace() const { return workspace_; }
  int64_t bytes() const { return bytes_; }

  // The place in the workspace where a result of so many bytes lies until Finish copies it to `result`. Null without
  // room.
  void* Redirect(void* result, int64_t bytes);

  // Redirects results of one call that overlap operands or results of any of its products.
  void RedirectResults(Operands* products, size_t count);

  // Copies operands that are not aligned, as far as there is room, and sets lhs_aligned and weights_aligned.
  void Align(Operands* product);

  // The operand if it is aligned, or else a copy of it. Null without room.
  const void* Aligned(const Extent& operand);

  bool copied() const { return copied_; }

  // Copies redirected results to where they belong, in order. Returns the first error of all copies.
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
  bool copies_;
  std::vector<Result> results_;
  bool copied_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Bytes of workspace that the redirected results of these products take.
int64_t RedirectedBytes(const Operands* products, size_t count);

}  // namespace jaxlowbit
