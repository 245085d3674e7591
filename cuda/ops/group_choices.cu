// SPDX-License-Identifier: Apache-2.0
//
// group_choices: the stable order of choices by expert, sizes of the groups, and the rows of x in this order. Results
// do not depend on the order of threads.
//
// Up to kMaxCompared choices: one kernel. A CTA compares its choice with all choices and copies its row.
// Bound: the latency of two loads and a store. The row is loaded while choices are compared.
// More choices: a CTA per expert finds the places of its choices in two passes over all of them, then a CTA per token
// copies its row to all of its places. Bound: memory, for the copies.

#include <climits>

#include "cuda/device/pdl.cuh"
#include "cuda/device/schedule/local_experts.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/group_choices.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxCompared = 2048;
constexpr int kThreads = 128;  // per choice, or per token
constexpr int kWarps = kThreads / 32;
constexpr int kRankThreads = 1024;  // per expert
constexpr int kRankWarps = kRankThreads / 32;
static_assert(kRankWarps == 32);

// What one choice finds among all choices.
struct Order {
  int before;      // choices in front of it
  int same;        // choices of its expert
  int same_later;  // of these, choices behind it
  int next;        // the next larger position of an expert; INT_MAX: none
};

__device__ Order Reduce(Order order) {
  order.before = static_cast<int>(__reduce_add_sync(~0u, order.before));
  order.same = static_cast<int>(__reduce_add_sync(~0u, order.same));
  order.same_later = static_cast<int>(__reduce_add_sync(~0u, order.same_later));
  order.next = __reduce_min_sync(~0u, order.next);
  return order;
}

// The order of a choice, in all threads of the CTA. `own`: the position of its expert.
__device__ Order Compare(const GroupChoices& p, const LocalExperts& local, int choice, int own) {
  __shared__ int4 of_warps[kWarps];
  const int choices = p.tokens * p.top;
  Order order = {0, 0, 0, INT_MAX};
#pragma unroll 4
  for (int i = threadIdx.x; i < choices; i += kThreads) {
    const int other = local.Position(p.expert[i]);
    order.before += other < own || (other == own && i < choice);
    order.same += other == own;
    order.same_later += other == own && i > choice;
    if (other > own) order.next = min(order.next, other);
  }
  order = Reduce(order);
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = make_int4(order.before, order.same, order.same_later, order.next);
  }
  __syncthreads();
  order = {0, 0, 0, INT_MAX};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const int4 part = of_warps[warp];
    order.before += part.x;
    order.same += part.y;
    order.same_later += part.z;
    order.next = min(order.next, part.w);
  }
  return order;
}

// Stores the sizes that a choice is responsible for: of its expert if it is the last choice of this one, and of the
// experts without choices up to the next expert with choices. The first choice stores those in front of its expert.
__device__ void StoreSizes(const GroupChoices& p, int own, const Order& order) {
  if (order.before == 0) {
    for (int e = threadIdx.x; e < own; e += kThreads) p.sizes[e] = 0;
  }
  if (order.same_later > 0) return;
  if (own < p.experts && threadIdx.x == 0) p.sizes[own] = order.same;
  for (int e = own + 1 + threadIdx.x; e < min(order.next, p.experts); e += kThreads) {
    p.sizes[e] = 0;
  }
}

// A CTA has a choice. Unit: a row consists of whole units.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    GroupKernel(const __grid_constant__ GroupChoices p, int units) {
  constexpr int kAhead = 4;  // units per thread that are loaded before the place is known
  LaunchDependents();
  WaitForPreviousKernels();
  const int choice = blockIdx.x;
  const Unit* from = static_cast<const Unit*>(p.x) + int64_t{choice / p.top} * units;
  Unit ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int unit = i * kThreads + threadIdx.x;
    if (unit < units) ahead[i] = from[unit];
  }
  const LocalExperts local(p.experts, p.offset);
  const int own = local.Position(p.expert[choice]);
  const Order order = Compare(p, local, choice, own);
  const bool is_local = own < p.experts;
  StoreSizes(p, own, order);
  if (threadIdx.x == 0) p.place[choice] = is_local ? order.before : -1;
  if (!is_local) return;
  Unit* to = static_cast<Unit*>(p.rows) + int64_t{order.before} * units;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int unit = i * kThreads + threadIdx.x;
    if (unit < units) to[unit] = ahead[i];
  }
  for (int unit = kAhead * kThreads + threadIdx.x; unit < units; unit += kThreads) {
    to[unit] = from[unit];
  }
}

// One CTA per local expert, and one for the choices of other experts. Each warp has a range of choices.
__global__ void __launch_bounds__(kRankThreads) RankKernel(const __grid_constant__ GroupChoices p) {
  __shared__ int2 of_warps[kRankWarps];
  LaunchDependents();
  WaitForPreviousKernels();
  const LocalExperts local(p.experts, p.offset);
  const int own = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int choices = p.tokens * p.top;
  const int range = (choices + kRankThreads - 1) / kRankThreads * 32;
  const int begin = min(warp * range, choices), end = min(begin + range, choices);
  int before = 0, same = 0;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) {
    const int other = local.Position(p.expert[i]);
    before += other < own;
    same += other == own;
  }
  before = static_cast<int>(__reduce_add_sync(~0u, before));
  same = static_cast<int>(__reduce_add_sync(~0u, same));
  if (lane == 0) of_warps[warp] = make_int2(before, same);
  __syncthreads();
  const int2 part = of_warps[lane];
  const int in_front = part.x + (lane < warp ? part.y : 0);
  int place = static_cast<int>(__reduce_add_sync(~0u, in_front));
  const int all = static_cast<int>(__reduce_add_sync(~0u, part.y));
  if (own < p.experts && threadIdx.x == 0) p.sizes[own] = all;
  if (same == 0) return;
#pragma unroll 4
  for (int i = begin; i < end; i += 32) {
    const bool found = i + lane < end && local.Position(p.expert[i + lane]) == own;
    const unsigned all_found = __ballot_sync(~0u, found);
    const int earlier = __popc(all_found & ((1u << lane) - 1));
    if (found) p.place[i + lane] = own < p.experts ? place + earlier : -1;
    place += __popc(all_found);
  }
}

// One CTA per token, after RankKernel.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    CopyRowsKernel(const __grid_constant__ GroupChoices p, int units) {
  LaunchDependents();
  WaitForPreviousKernels();
  const Unit* from = static_cast<const Unit*>(p.x) + int64_t{blockIdx.x} * units;
  const int32_t* place = p.place + int64_t{blockIdx.x} * p.top;
  for (int unit = threadIdx.x; unit < units; unit += kThreads) {
    const Unit value = from[unit];
    for (int i = 0; i < p.top; ++i) {
      const int row = place[i];
      if (row >= 0) static_cast<Unit*>(p.rows)[int64_t{row} * units + unit] = value;
    }
  }
}

template <typename Unit>
cudaError_t Launch(const GroupChoices& group, cudaStream_t stream) {
  const int units = static_cast<int>(group.columns * 2 / static_cast<int64_t>(sizeof(Unit)));
  const int choices = group.tokens * group.top;
  if (choices <= kMaxCompared) {
    const LaunchConfig launch(choices, kThreads, 0, stream, group.pdl);
    return cudaLaunchKernelEx(&launch.config, GroupKernel<Unit>, group, units);
  }
  const LaunchConfig rank(group.experts + 1, kRankThreads, 0, stream, group.pdl);
  const cudaError_t error = cudaLaunchKernelEx(&rank.config, RankKernel, group);
  if (error != cudaSuccess) return error;
  const LaunchConfig copy(group.tokens, kThreads, 0, stream, true);
  return cudaLaunchKernelEx(&copy.config, CopyRowsKernel<Unit>, group, units);
}

}  // namespace

cudaError_t PrepareGroupChoices() {
  for (const void* kernel : {reinterpret_cast<const void*>(GroupKernel<uint4>),
                             reinterpret_cast<const void*>(GroupKernel<uint16_t>),
                             reinterpret_cast<const void*>(RankKernel),
                             reinterpret_cast<const void*>(CopyRowsKernel<uint4>),
                             reinterpret_cast<const void*>(CopyRowsKernel<uint16_t>)}) {
    const cudaError_t error = PreferSharedMemory(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchGroupChoices(const GroupChoices& group, cudaStream_t stream) {
  const bool vectors =
      group.columns * 2 % kAlignment == 0 && IsAligned(group.x) && IsAligned(group.rows);
  return (vectors ? Launch<uint4> : Launch<uint16_t>)(group, stream);
}

}  // namespace jaxlowbit
