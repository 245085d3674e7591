// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>

#include "cuda/kernels/launch_config.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/params.h"
#include "cuda/kernels/sm90_stream/instances.h"
#include "cuda/kernels/sm90_stream/launch.h"
#include "cuda/kernels/sm90_stream/params.cuh"
#include "cuda/kernels/sm90_stream/select.h"
#include "cuda/kernels/tensor_map.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm90_stream {
namespace {

// Fills in the products of a launch and the clusters of each. Returns the number of clusters.
int AssignClusters(const Operands* products, size_t count, int slices, Params& p) {
  int clusters = 0;
  for (size_t i = 0; i < kMaxProducts; ++i) {
    p.first_cluster[i] = i < count ? clusters : std::numeric_limits<int>::max();
    if (i >= count) continue;
    const auto& [problem, buffers] = products[i];
    p.products[i] = {buffers.packed,
                     buffers.scale,
                     buffers.zero,
                     buffers.index,
                     buffers.out,
                     problem.num_weights,
                     static_cast<int>(problem.n),
                     static_cast<int>(problem.n_blocks()),
                     static_cast<int>(problem.strips())};
    p.units[i] = UnitsOf(problem, buffers);
    p.epilogue.any |= problem.epilogue.units > 0;
    clusters += static_cast<int>(CeilDiv(problem.strips() * kSlicesPerStrip, slices));
  }
  return clusters;
}

// Sets all parameters except the products; `buffers` belong to one of them.
Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                int ctas_per_sm) {
  Params p = {};
  p.original_lhs = buffers.lhs;
  p.permutation = buffers.permutation;
  p.part_columns = static_cast<int>(problem.k / std::max<int64_t>(problem.permuted_parts, 1));
  p.zero_bytes = static_cast<int>(problem.zero_bytes());
  p.m = static_cast<int>(problem.m);
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.scale_rows());
  const int64_t size = problem.group_size;
  p.atoms_per_group = AtomsPerGroup(problem);
  p.groups_per_atom = GroupsPerAtom(problem);
  // Every stage begins with a group or lies in one, and so do two of a warp's atoms of a stage.
  const bool own_groups = size > 0 && size <= kAtom;
  p.atom_step = own_groups ? p.groups_per_atom * static_cast<int>(kAtom) : 0;
  p.pair_step = size == 2 * kAtom ? static_cast<int>(kAtom) : 0;
  p.out_float = problem.out == ElementType::kF32;
  p.epilogue = EpilogueOf(problem, buffers);
  p.to_float8 = problem.rounding == Rounding::kE4m3;
  p.apply_lhs_scale = problem.apply_lhs_scale && problem.rounding == Rounding::kNone;
  if (p.apply_lhs_scale) {
    p.epilogue.residual = buffers.lhs_scale;
    p.epilogue.residual_float = p.epilogue.any = true;
  }
  p.table = TableOf(problem, buffers);
  p.super_groups = static_cast<int>(size > 0 ? kSuperBlock / size : 0);
  for (int64_t steps = size / kStepRows; steps > 1; steps /= 2) ++p.group_shift;
  p.plan = PlanOf(problem, choice.split_k, choice.slices, ctas_per_sm);
  const int in_stage = static_cast<int>(size > 0 ? CeilDiv(p.plan.stage_atoms * kAtom, size) : 0);
  p.stage_super_groups = std::min(p.super_groups, in_stage);
  const StageBytes& bytes = p.plan.bytes;
  const int scales_at = bytes.lhs + bytes.packed;
  p.zeros_at = scales_at + bytes.scales - scales_at / static_cast<int>(problem.scale_bytes());
  // TMA loads complete in order, so weights of further stages ahead of the first activations would delay the first mma.
  // Under PDL, only weights can be loaded before the previous kernel has ended.
  p.prologue_stages = problem.pdl ? p.plan.num_stages : 2;
  p.pairs = DivideBy(CeilDiv(p.plan.tile_slices, kSlicesPerWarp));
  return p;
}

}  // namespace

cudaError_t Load(const void* function) {
  const cudaError_t error = PreferSharedMemory(function);
  return error == cudaSuccess ? AllowSharedMemory(function, Sm90SharedBytes(1)) : error;
}

cudaError_t Launch(const QuantizedMatmul& problem, const Operands* products, size_t count,
                   const Choice& choice, const Device& device, cudaStream_t stream) {
  if (count > kMaxProducts) return cudaErrorInvalidValue;
  const void* function = nullptr;
  cudaError_t error = KernelOn(device, sm90_stream::KeyOf(problem, choice, device), &function);
  if (error != cudaSuccess) return error;
  const Buffers& buffers = products[0].buffers;
  const QuantizedMatmul blocks = BlocksOf(problem, choice.block_m);
  Params p = ParamsOf(blocks, buffers, choice, CtasPerSm(blocks, device, choice));
  p.ragged = RaggedOf(problem, buffers);
  const int clusters = AssignClusters(products, count, choice.slices, p);
  error = DescribeMatrix(buffers.lhs, problem.lhs, problem.batch * problem.m, problem.k,
                         p.plan.lhs_rows, p.plan.stage_atoms, &p.lhs);
  if (error != cudaSuccess) return error;
  const int64_t batch =
      problem.is_ragged() ? MaxBlocks(problem, choice.block_m) : problem.batch;
  const dim3 grid(static_cast<unsigned>(clusters * choice.split_k), static_cast<unsigned>(batch));
  const LaunchConfig launch(grid, kThreads, p.plan.shared_bytes, stream, problem.pdl,
                            choice.split_k);
  return LaunchFunction(launch, function, &p);
}

}  // namespace jaxlowbit::sm90_stream
