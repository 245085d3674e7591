// SPDX-License-Identifier: Apache-2.0
//
// Selects a kernel: a pure function of the problem and a few device properties, which runs and is tested without a GPU.
// Each kernel has its own functions (kernels/*/select.h); these iterate over all kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/limits.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

class TunedTable;

// Whether any kernel computes `problem` on `device`.
Support Supports(const QuantizedMatmul& problem, const Device& device);

// Whether `kernel` computes `problem` on `device`.
Support Supports(Kernel kernel, const QuantizedMatmul& problem, const Device& device);

// Whether `choice` can run, with `workspace_bytes` for its partial sums.
Support Supports(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes);

// Expected microseconds of `choice`, which must be supported, with `constants` in place of the kernel's fitted ones if
// they are given (tools/fit_costs.py).
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const double* constants = nullptr);

// A choice for a ragged product, and its expected microseconds without the floor of ReadCost.
struct RaggedChoice {
  Choice choice;
  double computed;
};

// The choices for a ragged product. Select takes the cheapest one, and the first one if several cost about the same. The
// cost is the larger one of `computed` and ReadCost.
std::vector<RaggedChoice> RaggedChoices(const QuantizedMatmul& problem, const Device& device);

// Expected microseconds for reading each weight of a ragged product that has rows once; by a list, for each row.
double ReadCost(const QuantizedMatmul& problem, const Device& device);

// Whether ragged products of the same rows take less time if each row reads its weight (listed_per_row) than if rows of
// a group share it, which needs a kernel that sorts them by group, or persistent CTAs. All buffers must be aligned.
bool PrefersList(const std::vector<QuantizedMatmul>& products, const Device& device);

// The cost constants of a kernel (kernels/*/costs.h), in the order of its costs.inc.
std::vector<double> CostConstants(Kernel kernel);

// The cheapest choice of a kernel that supports `problem`.
Choice Configure(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes);

// The measured choice of `tuned`, if it is given and has one for `problem`, else the cheapest choice of all kernels.
// Requires Supports(problem, device), positive m, n, k and batch, and m and batch within the limits of a launch.
Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
              const TunedTable* tuned = nullptr);

// Every supported choice of `kernel` for the problem.
std::vector<Choice> AllChoices(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes);

// The choices worth measuring: first the result of Select, then the cheapest choices of each kernel, within the error
// of the cost model. Same requirements as Select.
std::vector<Choice> Candidates(const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes);

// Minimum M for 8 bits to be faster on Hopper than bfloat16, given an 8-bit lhs. Smaller M are limited by weight
// bandwidth, not by tensor cores. The minimum is lower if int8 accumulates over all of k, which takes fewer
// instructions.
constexpr int64_t MinRowsFor8Bit(const QuantizedMatmul& problem) {
  const bool single_accumulator = problem.groups() == 1 || problem.scale == ElementType::kInt8;
  return problem.lhs == ElementType::kInt8 && single_accumulator ? 32 : 192;
}

// Estimates Device::clusters from the number of SMs, for devices that cannot be queried.
void AssumeClusters(Device& device);

}  // namespace jaxlowbit
