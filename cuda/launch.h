// SPDX-License-Identifier: Apache-2.0
//
// Host interface of the kernels: prepare them once per device, then enqueue products.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Reads the properties of `device` (a CUDA ordinal) that the selection needs, loads the auxiliary kernels, and looks up
// measured choices by the device's name (select/tuned.h). Thread-safe. Later calls return immediately, or retry after a
// failure. Must not run first during stream capture.
cudaError_t PrepareKernels(int device);

// The CUDA ordinal of a stream's device. (XLA's ordinals count only the devices that XLA was told to use.)
cudaError_t DeviceOf(cudaStream_t stream, int* device);

// Properties of `device` that PrepareKernels read.
const Device& DeviceInfo(int device);

// Enqueues the products of one call on `stream`, in order, at any address (placement.h), each in as many launches as
// the limits of a grid require. All but the first use PDL. Products that qmm_sm90_stream may join
// (sm90_stream::MayJoin) share one launch. If a product has a permutation that its kernel does not gather itself, a
// gather kernel precedes it.
//
// Only launches: it does not allocate device memory, synchronise or query the device, so it can be captured into a
// graph. The products share the workspace of the first, which may be uninitialised; with less than kMaxWorkspaceBytes,
// k is split into fewer slices.
cudaError_t LaunchProducts(std::vector<Operands> products, int64_t workspace_bytes, int device,
                           cudaStream_t stream);

// Loads the kernels that LaunchProducts would launch for these products if their buffers are aligned and do not
// overlap. This may compile for seconds and may allocate device memory. Repeated calls on a thread cost one table
// lookup.
cudaError_t LoadProducts(const std::vector<QuantizedMatmul>& problems, int64_t workspace_bytes,
                         int device);

// Starts compiling the kernels that products will probably launch on the current device, if any. Never fails.
void StartCompiling(const std::vector<QuantizedMatmul>& problems);

// Enqueues a product by an explicit choice (the autotuner's entry point). The product must be within the limits of a
// launch, its operands aligned as the problem says, and its result must not overlap them.
cudaError_t LaunchChoice(const QuantizedMatmul& problem, const Buffers& buffers,
                         const Choice& choice, int device, cudaStream_t stream);

// Loads the kernels that LaunchChoice would launch for these choices.
cudaError_t LoadChoices(const QuantizedMatmul& problem, const std::vector<Choice>& choices,
                        int device);

}  // namespace jaxlowbit
