// SPDX-License-Identifier: Apache-2.0
//
// What the kernels offer to a host program: prepare them once per device, then enqueue products.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// Reads what the selection needs of `device`, CUDA's number of it, loads the kernels around products there, and looks
// up what was measured on devices of its name (select/tuned.h). Thread-safe, and free once it has succeeded; a later
// call tries again after a failure. Must have run before a stream of that device is captured.
cudaError_t PrepareKernels(int device);

// The device that a stream belongs to, by CUDA's number. XLA counts only those that it was told to use.
cudaError_t DeviceOf(cudaStream_t stream, int* device);

// What PrepareKernels found out about `device`.
const Device& DeviceInfo(int device);

// Enqueues the products of one call on `stream`, in order, wherever their buffers lie (placement.h), each in as many
// launches as the limits of a grid take. All but the first use PDL. Products that qmm_sm90_stream may join
// (sm90_stream::MayJoin) are one launch. A product with a permutation that its kernel does not gather itself is
// preceded by a kernel that does.
//
// Only launches: no allocation of device memory, no synchronisation and no query of the device, so that it can be
// captured into a graph. The products share the workspace of the first, which may hold anything; with less than
// kMaxWorkspaceBytes of it, k is split into fewer slices.
cudaError_t LaunchProducts(std::vector<Operands> products, int64_t workspace_bytes, int device,
                           cudaStream_t stream);

// Loads what LaunchProducts would launch for such products if their buffers are aligned and apart, which may take the
// seconds of a compiler and may allocate device memory. It costs a look into a table once this thread has done so.
cudaError_t LoadProducts(const std::vector<QuantizedMatmul>& problems, int64_t workspace_bytes,
                         int device);

// Begins to compile what products will launch on the current device, if there is one; a guess, which never fails.
void StartCompiling(const std::vector<QuantizedMatmul>& problems);

// Enqueues a product by an explicit choice (the autotuner's entry point). The product is within the limits of a
// launch, its operands are aligned as the problem says, and its result overlaps none of them.
cudaError_t LaunchChoice(const QuantizedMatmul& problem, const Buffers& buffers,
                         const Choice& choice, int device, cudaStream_t stream);

// Loads what LaunchChoice would launch by any of the choices.
cudaError_t LoadChoices(const QuantizedMatmul& problem, const std::vector<Choice>& choices,
                        int device);

}  // namespace jaxlowbit
