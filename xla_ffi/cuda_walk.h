// SPDX-License-Identifier: Apache-2.0
//
// Finds the steps of a decode step's layer that one launch of the walk computes (cuda/kernels/sm90_stream/walk.h): all
// that follow attention, up to the query, key and value of the next layer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "cuda/launch.h"
#include "cuda/ways.h"
#include "xla_ffi/call.h"

namespace jaxlowbit {

// The steps of a walk in a call: attention, then these.
inline constexpr size_t kFirstWalkStep = 1, kWalkCallSteps = 7;

// Bytes of the workspace that the walk of a call needs; 0 if its steps remain separate kernels. Depends on
// CurrentWalkMode, on types, shapes and places; not on pointers.
int64_t FindWalk(const Call& call, const Device& device);

using AddressOfPlace = std::function<Address(int64_t place)>;

// Whether the buffers of the walk of a call are aligned.
bool CanWalk(const Call& call, const AddressOfPlace& at, const Address& region, Ways* ways);

// Loads the steps of a walk: `clear` before attention, `walk` instead of the other steps. cudaErrorNotSupported: the
// device lacks room for the grid.
cudaError_t LoadWalk(const Call& call, const AddressOfPlace& at, const Address& region,
                     float epsilon, std::unique_ptr<const LoadedStep>* clear,
                     std::unique_ptr<const LoadedStep>* walk);

}  // namespace jaxlowbit
