// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm90_stream: the product of qmm_sm80.cu for few tokens (m up to 32) on Hopper, where it is a
// stream of the packed weights from memory, and everything else is to hide under that.
//
// Bound. 8192 x 8192 in 4 bits are 34.6 MB: 8.0 us at 4.3 TB/s, 260 KB for each of 132
// multiprocessors, of which half fits their shared memory. So what counts is that copies start at
// once, never pause, and that little is left to do when the last one has arrived.
//
// Decomposition. Weights are operand A of the instruction: a slice is 16 output channels. A cluster
// of 1, 2 or 4 CTAs owns neighbouring slices, each CTA a part of k; drawn for 4.
//
//               k ──►  rank 0   rank 1   rank 2   rank 3
//             ┌────────┬────────┬────────┬────────┐   A CTA works through its slices in tiles of up
//        n    │        │        │        │        │   to 16, and through its k in stages. 8 warps
//        │    │ CTA 0  │ CTA 1  │ CTA 2  │ CTA 3  │   multiply, 2 slices each; where a tile has
//        ▼    │        │        │        │        │   fewer, they divide the stage's atoms of k.
//             └────────┴────────┴────────┴────────┘
//
// Pipeline.   warp 8: wait for a free slot ─► bulk copies of codes, lhs, scales     (fill.cuh)
//             warps 0-7: wait for a full slot ─► dequantize ─► mma ─► free it       (multiply.cuh)
//             end of a tile: send sums to their owners ─► add in order ─► epilogue ─► store
//                                                                                   (reduce.cuh)
//
// Gated. Strips of the gate and of up take turns, and a warp's two slices are the same channels of both.
//
// Storage. Codes are in the order of the fragments (device/layout.cuh): a lane's registers for a
// slice and an atom are 16 or 32 consecutive bytes.
//
// Limits: Unsupported() in dispatch.cc.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "cuda/kernels.h"
#include "cuda/launch_config.h"
#include "cuda/qmm_sm90_stream/fill.cuh"
#include "cuda/qmm_sm90_stream/gather.cuh"
#include "cuda/qmm_sm90_stream/multiply.cuh"
#include "cuda/qmm_sm90_stream/params.cuh"
#include "cuda/qmm_sm90_stream/reduce.cuh"
#include "cuda/tensor_map.h"

namespace jaxlowbit {
namespace qmm_sm90_stream {
namespace {

// One warp. (Elsewhere the kernel is empty: it only runs on sm_90.)
[[maybe_unused]] __device__ void InitBarriers(const Plan& plan, Memory memory) {
  const int lane = threadIdx.x % 32;
  if (lane < plan.num_stages) {
    InitBarrier(memory.full(lane), 1);
    InitBarrier(memory.empty(lane), kWarps * kWarpArrivals);
  } else if (lane == kMaxStages) {
    InitBarrier(memory.sums_full(), 1);
    InitBarrier(memory.sums_free(), 1 << plan.cluster_shift);
  }
  PublishBarriers();
}

// What a warp multiplies: of a tile's slices the two from `slice` on, of a stage's atoms one part.
struct Place {
  int slice, part;
};

[[maybe_unused]] __device__ Place OwnPlace(const Params& p) {
  const int warp = Keep(threadIdx.x) / 32;  // computed again where needed: registers are short
  const int part = p.pairs.Divide(warp);
  const int pairs = (p.plan.tile_slices + kSlicesPerWarp - 1) / kSlicesPerWarp;
  return {(warp - part * pairs) * kSlicesPerWarp, part};
}

template <class I>
__device__ void MultiplyAll(const Params& p, const Share& share, Memory memory) {
  const Plan& plan = p.plan;
  const ClusterReducer<I> reducer(p, share, memory);
  // Kept in registers: the compiler would load and compute them again for every stage.
  const int stage_atoms = Keep(plan.stage_atoms), num_stages = Keep(plan.num_stages);
  const int slot_bytes = Keep(plan.slot_bytes);
  const uint32_t ring = Keep(memory.stage(plan, 0));
  const int lane = Keep(threadIdx.x % 32);
  StageMultiplier<I> multiplier(p, OwnPlace(p).part, lane);
  uint32_t gathered_end = 0;
  if constexpr (I::kGathers) {
    GatherActivations(p, share, memory);
    const int atoms = share.atom_end - share.atom_begin;
    gathered_end = Keep(memory.base + plan.gathered + atoms * multiplier.LhsBytes());
  }
  RingCursor cursor = {0, 0};
  int number = 0;  // of the tile
  for (int tile = share.slice_begin; tile < share.slice_end; tile += plan.tile_slices) {
    const int slices = min(plan.tile_slices, share.slice_end - tile);
    const Place own = OwnPlace(p);
    const bool active = own.slice < slices && own.part < plan.warps_k;
    if (threadIdx.x == 0) reducer.Expect(slices);
    multiplier.StartTile(tile, own.slice, slices);
    Sums<I> sums = {};
    for (int left = share.atom_end - share.atom_begin; left > 0; left -= stage_atoms) {
      Wait(memory.full(cursor.slot), cursor.parity);
      const uint32_t stage = ring + cursor.slot * slot_bytes;
      const uint32_t activations =
          I::kGathers ? gathered_end - left * multiplier.LhsBytes() : stage;
      if (active) multiplier.Multiply(stage, activations, left, sums);
      ArriveAsWarp(memory.empty(cursor.slot), lane);  // every lane has read the stage
      cursor.Advance(num_stages);
    }
    if (number == 0) {
      WaitForArrivals();  // the barriers of all CTAs exist
    } else {
      WaitForCluster(memory.sums_free(), (number - 1) % 2);  // owners have read the sums before
    }
    const Place sent = OwnPlace(p);
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      if (active && sent.slice + i < slices) reducer.Send(sent.slice + i, sent.part, sums[i]);
    }
    const auto first = reducer.LoadFirst(tile, slices);
    WaitForCluster(memory.sums_full(), number % 2);
    reducer.Collect(tile, slices, first);
    if (tile + plan.tile_slices < share.slice_end) {
      SynchronizeMultipliers();  // every thread has read its sums
      if (threadIdx.x < 1 << plan.cluster_shift) {
        ArriveRemote(MapToRank(memory.sums_free(), threadIdx.x));
      }
    }
    ++number;
  }
}

template <class I>
__global__ void __launch_bounds__(kThreads, I::kCtasPerSm)
    QmmSm90StreamKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(kBoxBytes) uint8_t shared[];
  const Memory memory = {Keep(SharedAddress(shared))};
  const int warp = threadIdx.x / 32;
  const auto synchronize = [] {
    __syncthreads();  // barriers exist
    ArriveAtCluster();
    LaunchDependents();
  };
  if (warp == kWarps) {
    const Share share = OwnShare(p);
    StageFiller<I> filler(p, share, memory);  // works out what to copy, while barriers are made
    synchronize();
    filler.FillAll();
    WaitForArrivals();
  } else {
    if (warp == 0) InitBarriers(p.plan, memory);
    synchronize();
    MultiplyAll<I>(p, OwnShare(p), memory);
  }
#endif
}

using KernelFunction = void (*)(Params);

// Which instances for so many tokens a plan runs.
struct Variant {
  int tokens, ctas_per_sm;
  bool gathers;  // of 8 tokens only
};

constexpr Variant kVariants[] = {
    {8, kMaxCtasPerSm, false},  {8, kMaxCtasPerSm, true}, {16, 1, false},
    {16, kMaxCtasPerSm, false}, {32, 1, false},           {32, kMaxCtasPerSm, false}};

// Null beyond MaxTokens. Of 8 tokens, an instance takes no more registers where it has a multiprocessor to
// itself.
template <typename T, typename S, ZeroKind kZero, int kBits, int kCtas>
KernelFunction Find(int tokens, bool gathers) {
  if (tokens == 8) {
    return gathers ? QmmSm90StreamKernel<Instance<T, S, kZero, 8, kBits, kMaxCtasPerSm, true>>
                   : QmmSm90StreamKernel<Instance<T, S, kZero, 8, kBits, kMaxCtasPerSm>>;
  }
  if (tokens == 16) return QmmSm90StreamKernel<Instance<T, S, kZero, 16, kBits, kCtas>>;
  if constexpr (MaxTokens(kBits) == 32) {
    return QmmSm90StreamKernel<Instance<T, S, kZero, 32, kBits, kCtas>>;
  }
  return nullptr;
}

template <typename T, typename S, ZeroKind kZero, int kBits>
KernelFunction Find(const Variant& variant) {
  return variant.ctas_per_sm == 1
             ? Find<T, S, kZero, kBits, 1>(variant.tokens, variant.gathers)
             : Find<T, S, kZero, kBits, kMaxCtasPerSm>(variant.tokens, variant.gathers);
}

template <typename T, typename S, ZeroKind kZero>
KernelFunction Find(int bits, const Variant& variant) {
  return bits == 4 ? Find<T, S, kZero, 4>(variant) : Find<T, S, kZero, 8>(variant);
}

template <typename T, typename S>
KernelFunction Find(ZeroKind zero, int bits, const Variant& variant) {
  return zero == ZeroKind::kNone      ? Find<T, S, ZeroKind::kNone>(bits, variant)
         : zero == ZeroKind::kInteger ? Find<T, S, ZeroKind::kInteger>(bits, variant)
                                      : Find<T, S, ZeroKind::kFloat>(bits, variant);
}

KernelFunction Find(const QuantizedMatmul& problem, const Variant& variant) {
  const auto find = [&](auto lhs) {
    using T = decltype(lhs);
    return problem.scale == ElementType::kF32 ? Find<T, float>(problem.zero, problem.bits, variant)
                                              : Find<T, T>(problem.zero, problem.bits, variant);
  };
  return problem.lhs == ElementType::kBf16 ? find(__nv_bfloat16{}) : find(__half{});
}

// Fills in the parts. Returns the number of clusters.
int Divide(const Operands* products, size_t count, int slices, Params& p) {
  int clusters = 0;
  for (size_t i = 0; i < kMaxParts; ++i) {
    p.first_cluster[i] = i < count ? clusters : std::numeric_limits<int>::max();
    if (i >= count) continue;
    const auto& [problem, buffers] = products[i];
    p.parts[i] = {buffers.packed,
                  buffers.scale,
                  buffers.zero,
                  buffers.index,
                  buffers.out,
                  problem.num_weights,
                  static_cast<int>(problem.n),
                  static_cast<int>(problem.n_blocks()),
                  static_cast<int>(problem.strips())};
    clusters += static_cast<int>(CeilDiv(problem.strips() * kSlicesPerStrip, slices));
  }
  return clusters;
}

// All but the parts, of one of which `buffers` are.
Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                int ctas_per_sm) {
  Params p;
  p.rows = buffers.lhs;
  p.permutation = buffers.permutation;
  p.ordered = static_cast<int>(problem.k / std::max<int64_t>(problem.orders, 1));
  p.zero_bytes = static_cast<int>(problem.zero_bytes());
  p.m = static_cast<int>(problem.m);
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  const int64_t size = problem.group_size;
  p.atoms_per_group = Divider::By(size < 0 ? p.k_blocks : std::max<int64_t>(size / kAtom, 1));
  p.groups_per_atom = size > 0 && size < kAtom ? static_cast<int>(kAtom / size) : 1;
  // Stages begin with a group, or lie in one, and so do a warp's atoms of a stage, at most two.
  const bool own_groups = size > 0 && size <= kAtom;
  p.atom_step = own_groups ? p.groups_per_atom * static_cast<int>(kAtom) : 0;
  p.out_float = problem.out == ElementType::kF32;
  p.epilogue = EpilogueOf(problem, buffers);
  p.plan = PlanOf(problem, choice.split_k, choice.slices, ctas_per_sm);
  const StageBytes& bytes = p.plan.bytes;
  const int scales_at = bytes.lhs + bytes.codes;
  p.zeros_at = scales_at + bytes.scales - scales_at / static_cast<int>(problem.scale_bytes());
  // Copies arrive in their order: with more stages of weights before the first activations, the first
  // product would start later. Before the end of another kernel there is nothing else to copy.
  p.early_stages = problem.early_start ? p.plan.num_stages : 2;
  p.pairs = Divider::By(CeilDiv(p.plan.tile_slices, kSlicesPerWarp));
  return p;
}

}  // namespace
}  // namespace qmm_sm90_stream

cudaError_t InitializeQmmSm90Stream() {
  using namespace qmm_sm90_stream;
  const cudaError_t found = InitializeTensorMaps();
  if (found != cudaSuccess) return found;
  QuantizedMatmul problem;
  for (ElementType lhs : {ElementType::kF16, ElementType::kBf16}) {
    for (ElementType scale : {ElementType::kF32, lhs}) {
      for (ZeroKind zero : {ZeroKind::kNone, ZeroKind::kInteger, ZeroKind::kFloat}) {
        for (int bits : {8, 4}) {
          for (const Variant& variant : kVariants) {
            if (variant.tokens > MaxTokens(bits)) continue;
            problem.lhs = lhs, problem.scale = scale, problem.zero = zero, problem.bits = bits;
            const auto* kernel = reinterpret_cast<const void*>(Find(problem, variant));
            cudaError_t error = PreferSharedMemory(kernel);
            if (error == cudaSuccess) {
              error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           SharedBytes(1));
            }
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchQmmSm90Stream(const QuantizedMatmul& joined, const Operands* products,
                                size_t count, const Choice& choice, const Device& device,
                                cudaStream_t stream) {
  using namespace qmm_sm90_stream;
  if (count > kMaxParts) return cudaErrorInvalidValue;
  const Buffers& buffers = products[0].buffers;
  const int ctas_per_sm = StreamCtasPerSm(joined, device, choice);
  Params p = ParamsOf(joined, buffers, choice, ctas_per_sm);
  const int clusters = Divide(products, count, choice.slices, p);
  const cudaError_t error = DescribeMatrix(buffers.lhs, joined.lhs, joined.batch * joined.m,
                                           joined.k, p.plan.lhs_rows, p.plan.stage_atoms, &p.lhs);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(clusters * choice.split_k),
                  static_cast<unsigned>(joined.batch));
  const LaunchConfig launch(grid, kThreads, p.plan.shared_bytes, stream, joined.early_start,
                            choice.split_k);
  // Among kernels that start early, a CTA that is alone leaves registers to one of the next.
  const Variant variant = {choice.block_m, joined.early_start ? kMaxCtasPerSm : ctas_per_sm,
                           p.plan.gathers};
  return cudaLaunchKernelEx(&launch.config, Find(joined, variant), p);
}

}  // namespace jaxlowbit
