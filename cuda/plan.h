// SPDX-License-Identifier: Apache-2.0
//
// Plans the products of one call: their kernels, launches and copies. A pure function of the products, a device, the
// workspace and the ways of the pointers (ways.h), which runs and is tested without CUDA.
//
// XLA may pass pointers into larger buffers: a result may overlap an operand, and both may begin at any element
// (docs/custom_calls.md). But a kernel stores results while its other CTAs still read, and most kernels need 16-byte
// alignment. So results that overlap operands are first written to the workspace, and unaligned operands are copied
// there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device/inboxes.h"
#include "cuda/gpu.h"
#include "cuda/select/choice.h"
#include "cuda/select/tuned.h"
#include "cuda/ways.h"

namespace jaxlowbit {

// A copy, or a kernel, which may add its partial sums in a second launch.
struct PlannedStep {
  enum class Kind {
    kCopy,      // `bytes` from one address to another
    kGather,    // buffers.gathered = permuted lhs, of the only product
    kMultiply,  // the products, which have one lhs
  } kind;

  // kGather, kMultiply: the problem of the launch, which joins its products.
  QuantizedMatmul problem = {};
  Choice choice = {};
  std::vector<PlannedProduct> products = {};
  bool out_aligned = false, residual_aligned = false;  // only for choices of qmm_sm90
  // Both only with problem.divided. The next kernel starts after the previous one has ended; the result is sent to the
  // inboxes of several devices instead of being written.
  bool holds_next = false;
  Inboxes inboxes = {};

  Address from = {}, to = {};
  int64_t bytes = 0;
};

// Memory for redirected results, aligned copies and partial sums: the first bytes of a buffer.
struct Room {
  Address workspace;
  int64_t bytes = 0;

  // Takes memory from the end; null if there is not enough.
  Address Allocate(int64_t bytes);
};

// Why redirected results do not fit the workspace. Python requests that space, or gives results separate buffers
// (_backends/call.py).
std::string WorkspaceError(int64_t needed, int64_t workspace_bytes);

// A device that plans are made for.
struct Target {
  const Device* device = nullptr;
  const TunedTable* tuned = nullptr;  // its measured choices
};

// Appends the steps of products, in order, each in as many launches as the limits of a grid require. All but the first
// use PDL. Products that qmm_sm90_stream may join (sm90_stream::MayJoin) share one launch. If a product has a
// permutation that its kernel does not gather itself, a gather kernel precedes it. With less than kMaxWorkspaceBytes,
// k is split into fewer slices. Every product must be supported by some kernel if its buffers are aligned.
//
// Returns "" or the reason why these pointers are not possible.
std::string PlanProducts(std::vector<PlannedProduct> products, const Target& target, Room room,
                         Ways* ways, std::vector<PlannedStep>* steps);

// Whether a step's kernel has a divided instance, and whether that can send its result.
bool CanHoldNext(const PlannedStep& step);
bool CanSend(const PlannedStep& step);

// The steps of one product by an explicit choice, within the limits of a launch. Its operands must be aligned as the
// problem says, and its result must not overlap them.
std::vector<PlannedStep> PlanChoice(const PlannedProduct& product, const Choice& choice,
                                    const Device& device, Ways* ways);

}  // namespace jaxlowbit
