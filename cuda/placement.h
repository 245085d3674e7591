// SPDX-License-Identifier: Apache-2.0
//
// Handles overlapping and unaligned buffers. XLA may pass pointers into larger buffers: a result may overlap an
// operand, and both may begin at any element (docs/custom_calls.md). But a kernel stores results while its other CTAs
// still read, and most kernels need 16-byte alignment. So results that overlap operands are first written to the
// workspace, and unaligned operands are copied there. Other calls only pay for a few comparisons.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/extents.h"
#include "cuda/problem.h"

namespace jaxlowbit {

class Placement {
 public:
  // Allocates from the end of the workspace; `bytes` and `workspace` describe the rest. Without `copies`, only assigns
  // addresses.
  Placement(void* workspace, int64_t bytes, cudaStream_t stream, bool copies = true)
      : workspace_(workspace), bytes_(bytes), stream_(stream), copies_(copies) {}

  void* workspace() const { return workspace_; }
  int64_t bytes() const { return bytes_; }

  // Returns workspace for a result of `bytes`, which Finish copies to `result`; null if the workspace is full.
  void* Redirect(void* result, int64_t bytes);

  // Redirects results of a call that overlap operands or results of any of its products.
  void RedirectResults(Operands* products, size_t count);

  // Copies unaligned operands as far as the workspace allows, and sets lhs_aligned and weights_aligned.
  void Align(Operands* product);

  // Returns the operand if it is aligned, else a copy; null if the workspace is full.
  const void* Aligned(const Extent& operand);

  bool copied() const { return copied_; }

  // Copies redirected results to their buffers, in order. Returns the first error of all copies.
  cudaError_t Finish();

 private:
  struct Result {
    void* from;
    void* to;
    int64_t bytes;
  };

  void* Allocate(int64_t bytes);
  void Copy(const void* from, void* to, int64_t bytes);

  void* workspace_;
  int64_t bytes_;
  cudaStream_t stream_;
  bool copies_;
  std::vector<Result> results_;
  bool copied_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Bytes of workspace for the redirected results of these products.
int64_t RedirectedBytes(const Operands* products, size_t count);

}  // namespace jaxlowbit
