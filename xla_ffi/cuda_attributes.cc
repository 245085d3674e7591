// SPDX-License-Identifier: Apache-2.0

#include <utility>

#include "cuda/limits.h"
#include "cuda/select/select.h"
#include "xla_ffi/cuda_plan.h"

namespace jaxlowbit {

std::vector<PlannedStep> PlanAttributes(const std::vector<Product>& products,
                                        const std::vector<Step>& steps, bool divided,
                                        const Target& target) {
  std::vector<PlannedStep> plan;
  std::vector<PlannedProduct> located;
  for (const Product& product : products) {
    located.push_back({product.problem, {}});
    Addresses& b = located.back().buffers;
    b.codebook = product.codebook;
    // Any distinct numbers.
    const auto address = [](int64_t place) {
      return Address{static_cast<int>(place == 0 ? -1 : place > 0 ? 2 * place : -2 * place + 1), 0};
    };
#define JAXLOWBIT_PLACE(name) b.name = address(product.places.name);
#include "xla_ffi/call.def"
  }
  const Address workspace = {0, 0};
  for (const Step& step : steps) {
    if (step.kind == StepKind::kRound && products[step.first].problem.apply_lhs_scale &&
        step.scales == 0) {
      located[step.first].problem.rounding = RoundingTo(step.to);
    }
    const auto first = located.begin() + step.first;
    if (step.kind == StepKind::kGroup) {
      std::vector<QuantizedMatmul> problems;
      for (auto i = first; i != first + step.count; ++i) problems.push_back(i->problem);
      if (!PrefersList(problems, *target.device)) continue;
      for (auto i = first; i != first + step.count; ++i) i->problem.listed_per_row = 1;
    }
    if (step.kind != StepKind::kMultiply) continue;
    std::vector<PlannedProduct> together(first, first + step.count);
    for (PlannedProduct& product : together) {
      QuantizedMatmul& p = product.problem;
      if (p.batch < 1 || p.m < 1 || p.num_weights < 1) return plan;
      p.pdl = &step != &steps.front() && p.rounding == Rounding::kNone;
      if (!Supports(p, *target.device)) return plan;
    }
    Ways typical(nullptr);
    const size_t before = plan.size();
    PlanProducts(std::move(together), target, {workspace, kMaxWorkspaceBytes}, &typical, &plan);
    if (!divided || plan.size() != before + 1 || !CanHoldNext(plan[before])) continue;
    plan.push_back(plan[before]);  // which instance runs depends on pointers
    plan.back().problem.divided = true;
  }
  return plan;
}

}  // namespace jaxlowbit
