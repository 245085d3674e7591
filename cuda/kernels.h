// SPDX-License-Identifier: Apache-2.0
//
// What the kernels offer to a host program: prepare once per device, then enqueue.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/dispatch.h"
#include "cuda/problem.h"

namespace jaxlowbit {

// Loads every kernel and raises its shared-memory limit on `device`, CUDA's number of it, and looks up what was
// measured on devices of its name (tuned.h). Thread-safe, and free once it has succeeded; tried again after a
// failure. Must have run before a stream of that device is captured.
cudaError_t InitializeKernels(int device);

// The device that a stream belongs to, by CUDA's number. XLA counts only those that it was told to use.
cudaError_t DeviceOf(cudaStream_t stream, int* device);

// What InitializeKernels found out about `device`.
const Device& DeviceInfo(int device);

// Enqueues the problem on `stream`, wherever its buffers lie (placement.h), in as many launches as it takes
// (LaunchLimits); where it has orders and its kernel does not gather lhs itself, one
// that does comes before, and the product starts early. Only launches: no allocation, no
// synchronisation, no query of the device, so that it can be captured into a graph. The workspace may
// hold anything; with less of it than MaxWorkspaceBytes, the sum over k is split into fewer parts.
cudaError_t LaunchQuantizedMatmul(const QuantizedMatmul& problem, const Buffers& buffers,
                                  int64_t workspace_bytes, int device, cudaStream_t stream);

// The same of several products that share a workspace. Where qmm_sm90_stream runs them, those that may join
// (dispatch.h) are one launch; else one starts early after the other.
cudaError_t LaunchQuantizedMatmuls(std::vector<Operands> products, int64_t workspace_bytes,
                                   int device, cudaStream_t stream);

// Enqueues a product within the limits of a launch, whose operands are aligned and which its result does not
// overlap, by this choice; for those who measure choices.
cudaError_t LaunchChoice(const QuantizedMatmul& problem, const Buffers& buffers,
                         const Choice& choice, int device, cudaStream_t stream);

// rms_norm.cu: for each row, sum = x + addend, rounded, and with scales
// out = sum / sqrt(mean(sum^2) + epsilon) * scale. All of `type`, columns a multiple of 8 up to
// kMaxRmsNormColumns. Starts early where kernels can.
struct RmsNorm {
  ElementType type;
  int64_t rows, columns;
  const void *x, *addend, *scale;  // scale: null for none
  void *sum, *out;
  float epsilon;
};
cudaError_t InitializeRmsNorm();
cudaError_t LaunchRmsNorm(const RmsNorm& norm, int device, cudaStream_t stream);

// gather_lhs.cu: buffers.gathered = the columns of lhs in the order of the stored rows, of 16-bit
// elements. `problem` has orders and is not transposed.
cudaError_t InitializeGatherLhs(const Device& device);
cudaError_t LaunchGatherLhs(const QuantizedMatmul& problem, const Buffers& buffers,
                            const Device& device, cudaStream_t stream);

// qmm_sm80.cu.
cudaError_t InitializeQmmSm80();
cudaError_t LaunchQmmSm80(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, cudaStream_t stream);

// qmm_sm80_transposed.cu.
cudaError_t InitializeQmmSm80Transposed();
cudaError_t LaunchQmmSm80Transposed(const QuantizedMatmul& problem, const Buffers& buffers,
                                    const Choice& choice, cudaStream_t stream);

// qmm_sm90_stream.cu. One product, or `count` that may join and have become `joined` (dispatch.h), of which
// `choice` is.
cudaError_t InitializeQmmSm90Stream();
cudaError_t LaunchQmmSm90Stream(const QuantizedMatmul& joined, const Operands* products,
                                size_t count, const Choice& choice, const Device& device,
                                cudaStream_t stream);

// qmm_sm90.cu.
cudaError_t InitializeQmmSm90(Device& device);
cudaError_t LaunchQmmSm90(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, const Device& device, cudaStream_t stream);

// reduce_splits.cu. out[batch * m, columns] = the epilogue of the sum over splits of
// workspace[splits, batch * m, weights_per_element * (columns padded to atoms)].
cudaError_t InitializeReduceSplits();
cudaError_t LaunchReduceSplits(const QuantizedMatmul& problem, const Buffers& buffers, int split_k,
                               const Device& device, cudaStream_t stream);

}  // namespace jaxlowbit
