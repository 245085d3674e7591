// SPDX-License-Identifier: Apache-2.0
//
// The steps of a mixture of experts in front of and behind its products: route, group and combine (call.def).
#pragma once

#include <memory>

#include "cuda/launch.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

// The addresses of a step's buffers, by the names of its fields.
struct ExpertAddresses {
  Address x, scales, out, expert, offset, sizes, place, addend;
};

// Checks the buffers and the products of a group.
ffi::Error CheckGroup(const Call& call, const Step& step);

// Loads a group that has been checked. `pdl`: the previous kernel in the stream belongs to the call.
std::unique_ptr<const LoadedStep> LoadGroup(const Call& call, const Step& step,
                                            const ExpertAddresses& addresses, bool pdl);

// Checks the buffers of a router and loads it.
ffi::Error LoadRoute(const Call& call, const Step& step, const ExpertAddresses& addresses, bool pdl,
                     const Device& device, std::unique_ptr<const LoadedStep>* loaded);

// Checks the buffers of a combination and loads it. Without an address of its places, rows are in the order of choices
// of `experts` local experts.
ffi::Error LoadCombine(const Call& call, const Step& step, const ExpertAddresses& addresses,
                       int64_t experts, const Device& device,
                       std::unique_ptr<const LoadedStep>* loaded);

}  // namespace jaxlowbit
