// SPDX-License-Identifier: Apache-2.0
//
// The choice of a kernel: a pure function of the problem and a few numbers of the device. It runs, and is tested,
// without a GPU. Every kernel decides for itself (kernels/*/select.h); the functions here go through all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/limits.h"
#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

class TunedTable;

// Whether kernels compute `problem` on `device`.
Support Supports(const QuantizedMatmul& problem, const Device& device);

// Whether `kernel` does.
Support Supports(Kernel kernel, const QuantizedMatmul& problem, const Device& device);

// Whether `choice` can run, with `workspace_bytes` for its partial sums.
Support Supports(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes);

// Microseconds that `choice`, which is supported, is expected to take, by other constants than those of its kernel if
// they are given (tools/fit_costs.py).
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const double* constants = nullptr);

// The constants of a kernel's cost (kernels/*/costs.h), in the order of its costs.inc.
std::vector<double> CostConstants(Kernel kernel);

// The choice of least cost of a kernel that supports `problem`.
Choice Configure(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes);

// What `tuned`, if given, has measured for `problem`, or else the choice of least cost over the kernels. Requires
// that Supports(problem, device) holds, that m, n, k and batch are positive, and that m and batch are within the
// limits of a launch.
Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
              const TunedTable* tuned = nullptr);

// Every choice of `kernel` that supports the problem.
std::vector<Choice> AllChoices(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes);

// The choices worth measuring: first that of Select, then of each kernel those of least cost, as far as the cost model
// may be wrong. Requires what Select does.
std::vector<Choice> Candidates(const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes);

// Rows from which Hopper multiplies an 8-bit lhs faster in 8 bits than as bfloat16. Weights bound smaller products, not
// tensor cores; if int8 sums all of k as integers, that takes fewer instructions than weights in bfloat16.
constexpr int64_t LeastByteRows(const QuantizedMatmul& problem) {
  const bool one_sum = problem.groups() == 1 || problem.scale == ElementType::kInt8;
  return problem.lhs == ElementType::kInt8 && one_sum ? 32 : 192;
}

// Fills in Device::clusters from the number of multiprocessors, for a device that cannot be asked.
void AssumeClusters(Device& device);

}  // namespace jaxlowbit
