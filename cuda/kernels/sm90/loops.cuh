// SPDX-License-Identifier: Apache-2.0
//
// The four loops of multiply.cuh, one per task, since a branch in the loop would cost more than it saves:
//   Single group: scales multiply accumulators; the loop dequantizes to integers and loads no scales.
//   Long rows: every stage is inside one group. Scales are loaded once per stage; if their values allow it, fusing them
//     saves an instruction per pair of weights. For instances with groups as small as a step, this loop takes groups of
//     an atom or more and loads their scales without a branch in the middle of a unit.
//   Micro rows: groups of MXFP4, MXFP8 or NVFP4. The lanes of a row load the scales of a stage once.
//   Group rows: all other cases. Scales are loaded for every atom or every step.
//
// Some loops support only some scales. A warpgroup reads the scales of its first task before it waits for the barriers:
// later, they would queue behind the stages. An idle warp of the producer's warpgroup reads the scales of later tasks
// while the warpgroup multiplies.
#pragma once

#include <type_traits>

#include "cuda/device/barrier.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/kernels/sm90/params.cuh"

namespace jaxlowbit::sm90 {

// The row types of a strip: for a group with any scales, for a group whose scales fuse, and for a channel.
template <typename T, typename S, int kBits, Codebook kCodebook>
struct RowsOf {
  static constexpr int kDown = kCodebookShift<T, S, kCodebook>;
  static constexpr bool kCanFuse = Fusing<T, S, kCodebook, kDown>::kSupportsSome &&
                                   !Fusing<T, S, kCodebook, kDown>::kSupportsAll;
  using Group = typename CodebookRows<T, S, kBits, kCodebook, kDown>::type;
  using Fused = FusedNumberRowPair<T, S, kBits, kCodebook, kDown>;
  using Channel = NumberChannelRowPair<T, S, kBits, kCodebook, kDown>;
  static constexpr bool kSupportsAll = Fusing<T, S, kCodebook, kDown>::kSupportsAll;
  // Groups of an atom in the microscaling formats; 0 in others.
  static constexpr int kMicroGroups =
      Fusing<T, S, kCodebook, kDown>::kSupportsSome ? kMicroGroupsOf<S> : 0;
};

template <typename T, typename S, int kBits>
struct RowsOf<T, S, kBits, Codebook::kNone> {
  static constexpr bool kCanFuse = std::is_same_v<S, T> && jaxlowbit::kCanFuse<T, kBits>;
  using Group = ScaledRowPair<T, S, kBits>;
  using Fused = FusedRowPair<T, kBits>;
  using Channel = ChannelRowPair<T, S, kBits>;
  static constexpr bool kSupportsAll = false;
  static constexpr int kMicroGroups = 0;
};

// The row types of a strip in an instance, and the conditions of their loops.
template <class I>
struct Loops {
  using T = typename I::T;
  using S = typename I::S;
  using Rows = RowsOf<T, S, I::kBits, I::kCodebook>;

  // The row types: for any groups, for groups of kLongAtoms atoms or more, and for a channel.
  using GroupRows = typename Rows::Group;
  struct UnfusedRows : GroupRows {};
  static constexpr bool kFused = I::kZero != ZeroKind::kInteger && Rows::kCanFuse;
  using LongRows = std::conditional_t<kFused, typename Rows::Fused, UnfusedRows>;
  using ChannelRows = typename Rows::Channel;
  // MicroRows contain the scales of all groups of a stage, a number known at compile time.
  static constexpr int kMicroGroups = I::kM <= kMaxMicroscaledRows ? Rows::kMicroGroups : 0;
  static_assert(kMicroGroups != 1, "DependsOnScales distinguishes micro groups from long ones");
  template <int kGroups, class Fused>
  struct MicroRowsOf {
    using type = GroupedRowPair<Fused, S, kGroups * I::kStageAtoms>;
  };
  template <class Fused>
  struct MicroRowsOf<0, Fused> {
    using type = void;
  };
  using MicroRows = typename MicroRowsOf<kMicroGroups, typename Rows::Fused>::type;

  // Groups of LongRows have kLongAtoms atoms or a multiple. Scales are loaded at the start of each stage or group.
  static constexpr int kLongAtoms = I::kSupportsGroupsOf16 ? 1 : I::kStageAtoms;
  // The largest tiles hide the latency of scale loads, and have no registers for a third loop.
  static constexpr bool kHasLongRows = I::kM < 256 ? I::kSupportsGroupsOf16 || std::is_same_v<S, T>
                                                   : I::kSupportsGroupsOf16 && !I::kScalesChannels;
  static constexpr bool kChecksLong = kHasLongRows && kFused;
  static constexpr bool kChecksMicro = kMicroGroups > 0 && !Rows::kSupportsAll;

  static __device__ bool HasLongGroups(const Params& p) {
    return p.groups_per_atom == 1 && p.atoms_per_group.divisor % kLongAtoms == 0;
  }
  static __device__ bool HasMicroGroups(const Params& p) {
    return p.groups_per_atom == kMicroGroups;
  }

  // Whether the loop depends on the values of the scales.
  static __device__ bool DependsOnScales(const Params& p) {
    if (I::kScalesChannels && p.groups == 1) return false;
    return (kChecksLong && HasLongGroups(p)) || (kChecksMicro && HasMicroGroups(p));
  }

  // Thread `thread` of `threads` reads its share of the scales of a warpgroup's part of a task. Whether LongRows or
  // MicroRows support them.
  static __device__ bool Support(const Params& p, const Task& task, int warpgroup, int thread,
                                 int threads) {
    if constexpr (kChecksLong) {
      if (HasLongGroups(p)) return SupportBy<LongRows>(p, task, warpgroup, thread, threads);
    }
    if constexpr (kChecksMicro) return SupportBy<MicroRows>(p, task, warpgroup, thread, threads);
    return true;
  }

 private:
  template <class R>
  static __device__ bool SupportBy(const Params& p, const Task& task, int warpgroup, int thread,
                                   int threads) {
    constexpr int kChunks = static_cast<int>(kAtom * sizeof(S)) / kCopyBytes;  // per group
    const int group = FirstGroup(p, task.atom_begin);
    const int groups = FirstGroup(p, task.atom_end - 1) + 1 - group;
    const int strips = p.strips - task.tile.strip - warpgroup * I::kStrips;  // that exist
    const int chunks = strips > 0 ? groups * kChunks : 0;
    const uint4* scales[I::kStrips];
#pragma unroll
    for (int s = 0; s < I::kStrips; ++s) {
      const int strip = warpgroup * I::kStrips + max(0, min(s, strips - 1));
      const int64_t first = StripOf<I>(p, task.tile, strip) * p.groups + group;
      scales[s] = static_cast<const uint4*>(p.scale) + first * kChunks;
    }
    uint32_t any = 0;
#pragma unroll(4 / I::kStrips)
    for (int i = thread; i < chunks; i += threads) {
      uint4 own[I::kStrips];
#pragma unroll
      for (int s = 0; s < I::kStrips; ++s) own[s] = __ldg(scales[s] + i);
#pragma unroll
      for (const uint4& chunk : own) {
        for (uint32_t both : {chunk.x, chunk.y, chunk.z, chunk.w}) {
          any = R::Join(any, both);
        }
      }
    }
    return R::SupportsAllScales(any);
  }
};

// Whether the loop of a task depends on the values of its scales.
template <class I>
__device__ bool DependsOnScales(const Params& p) {
  if constexpr (I::k8BitLhs)
    return false;
  else
    return Loops<I>::DependsOnScales(p);
}

// Called by the consumers for a task without a CheckScales: whether its scales are supported.
template <class I>
__device__ bool ScalesFit(const Params& p, const Task& task) {
  if constexpr (!I::k8BitLhs) {
    if (Loops<I>::DependsOnScales(p)) {
      const int warpgroup = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
      const bool support = Loops<I>::Support(p, task, warpgroup, thread, 128);
      return AllOf(kWarpgroupBarrier + warpgroup, 128, support);
    }
  }
  return true;
}

// Called by a warp for the next task of a warpgroup, if DependsOnScales.
template <class I>
__device__ void CheckScales(const Params& p, const Task& task, int warpgroup) {
  if constexpr (!I::k8BitLhs) {
    const int lane = threadIdx.x % 32;
    AllOf(kScalesBarrier + warpgroup, kWarpgroupAndWarp,
          Loops<I>::Support(p, task, warpgroup, lane, 32));
  }
}

// Called by the consumers: the result of CheckScales.
template <class I>
__device__ bool CheckedScalesFit(const Params& p) {
  if (!DependsOnScales<I>(p)) return true;
  return AllOf(kScalesBarrier + static_cast<int>(threadIdx.x) / 128, kWarpgroupAndWarp, true);
}

}  // namespace jaxlowbit::sm90
