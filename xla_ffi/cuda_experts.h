// SPDX-License-Identifier: Apache-2.0
//
// The steps of a mixture of experts in front of and behind its products: route, group and combine (call.def).
#pragma once

#include <memory>

#include "cuda/launch.h"
#include "cuda/ops/combine_choices.h"
#include "cuda/ops/rms_norm.h"
#include "cuda/ops/route_choices.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

// The addresses of a step's buffers, by the names of its fields.
struct ExpertAddresses {
  Address x, scales, out, expert, offset, sizes, place, addend;
};

// The addresses of a normalization, in the order of the step's fields, and of the choices that it adds.
struct NormAddresses {
  Address x, addend, scales, total, out, out_scale;
  ExpertAddresses choices = {};
};

// Checks the buffers and the products of a group.
ffi::Error CheckGroup(const Call& call, const Step& step);

// Loads a group that has been checked. `pdl`: the previous kernel in the stream belongs to the call.
std::unique_ptr<const LoadedStep> LoadGroup(const Call& call, const Step& step,
                                            const ExpertAddresses& addresses, bool pdl);

// Checks the buffers of a router.
ffi::Error ReadRoute(const Call& call, const Step& step, const Device& device, RouteChoices* route);

// `norm`: of the normalization that the router computes, if it does.
std::unique_ptr<const LoadedStep> LoadRoute(const RouteChoices& route,
                                            const ExpertAddresses& addresses,
                                            const NormAddresses& norm);

// Checks the buffers of a combination. The number of local experts, which a combination without an address of its places
// needs, is not set.
ffi::Error ReadCombine(const Call& call, const Step& step, const Device& device,
                       CombineChoices* combine);

std::unique_ptr<const LoadedStep> LoadCombine(const CombineChoices& combine,
                                              const ExpertAddresses& addresses);

// Sets the pointers of a combination, or of a normalization.
void SetPointers(const ExpertAddresses& addresses, void* const* pointers, CombineChoices* combine);
void SetPointers(const NormAddresses& addresses, void* const* pointers, RmsNorm* norm);

}  // namespace jaxlowbit
