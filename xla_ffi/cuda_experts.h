// SPDX-License-Identifier: Apache-2.0
//
// The steps of a mixture of experts in front of and behind its products: route, group and combine (call.def).
#pragma once

#include <memory>
#include <vector>

#include "cuda/launch.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

// The addresses of a step's buffers, by the names of its fields.
struct ExpertAddresses {
  Address x, scales, out, expert, offset, sizes, place;
};

struct RouteAddresses {
  Address x, router, bias, expert, weight;
};

// Check the buffers of a step and load it. `products`: of the grouped rows, in order. `pdl`: the previous kernel in the
// stream belongs to the call.
ffi::Error LoadGroup(const Call& call, const Step& step, const ExpertAddresses& addresses,
                     const std::vector<PlannedProduct>& products, bool pdl,
                     std::unique_ptr<const LoadedStep>* loaded);
ffi::Error LoadRoute(const Call& call, const Step& step, const RouteAddresses& addresses, bool pdl,
                     const Device& device, std::unique_ptr<const LoadedStep>* loaded);
ffi::Error LoadCombine(const Call& call, const Step& step, const ExpertAddresses& addresses,
                       std::unique_ptr<const LoadedStep>* loaded);

}  // namespace jaxlowbit
