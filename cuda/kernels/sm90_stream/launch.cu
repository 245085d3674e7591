// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>
#include <vector>

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

// Fills in the products of a launch, except pointers, and the clusters of each. Returns the number of clusters.
int AssignClusters(const std::vector<PlannedProduct>& products, int slices, Params& p) {
  int clusters = 0;
  for (size_t i = 0; i < kMaxProducts; ++i) {
    p.first_cluster[i] = i < products.size() ? clusters : std::numeric_limits<int>::max();
    if (i >= products.size()) continue;
    const QuantizedMatmul& problem = products[i].problem;
    Product& own = p.products[i];
    own.num_weights = problem.num_weights;
    own.n = static_cast<int>(problem.n);
    own.n_blocks = static_cast<int>(problem.n_blocks());
    own.strips = static_cast<int>(problem.strips());
    p.units[i] = UnitsOf(problem);
    p.epilogue.any |= problem.epilogue.units > 0;
    clusters += static_cast<int>(CeilDiv(problem.strips() * kSlicesPerStrip, slices));
  }
  return clusters;
}

// Sets all parameters except the products and pointers; `buffers` belong to one of the products.
Params ParamsOf(const QuantizedMatmul& problem, const Addresses& buffers, const Choice& choice,
                int ctas_per_sm) {
  Params p = {};
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
  if (p.apply_lhs_scale) p.epilogue.residual_float = p.epilogue.any = true;
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

// Loads of the kernels behind delay this one's, but should have begun when this one's end. They begin two launches later,
// as this kernel loads its last ring and a half (docs/measurements/decode_step.md).
int LoadsUntilNext(const Plan& plan) {
  const int tiles = static_cast<int>(CeilDiv(plan.slices, plan.tile_slices));
  const int stages = plan.stages >> plan.cluster_shift, ring = plan.num_stages;
  return std::max(0, stages * tiles - std::min(stages, ring) - (ring + ring / 2));
}

// Makes room for the table of groups behind the stages.
void AddGroupTable(const QuantizedMatmul& problem, int limit, Plan* plan) {
  const auto bytes = [&] {
    return plan->ring + plan->num_stages * plan->slot_bytes + GroupTableBytes(problem);
  };
  while (plan->num_stages > 2 && bytes() > limit) --plan->num_stages;
  plan->shared_bytes = std::max(plan->shared_bytes, bytes());
}

// The schedule of rows that share no CTA, except pointers.
ListedParams ListedOf(const QuantizedMatmul& problem) {
  const bool has_list = problem.listed_per_row > 0;
  return {nullptr,
          nullptr,
          static_cast<int>(problem.experts()),
          DivideBy(has_list ? problem.listed_per_row : 1),
          has_list ? problem.waits_for_list : problem.pdl,
          has_list ? 0 : static_cast<int>(problem.groups_of_rows),
          static_cast<int>(problem.m)};
}

class StreamLaunch final : public KernelLaunch {
 public:
  StreamLaunch(const PlannedStep& step, const Device& device, const void* function)
      : count_(step.products.size()),
        function_(function),
        cluster_ctas_(step.choice.split_k),
        persistent_(step.problem.is_ragged() && !HasOwnCtas(step.problem, step.choice.block_m)),
        pdl_(step.problem.pdl) {
    const QuantizedMatmul& problem = step.problem;
    const Choice& choice = step.choice;
    const QuantizedMatmul blocks = BlocksOf(problem, choice.block_m);
    const int ctas_per_sm = CtasPerSm(blocks, device, choice);
    const int resident = device.clusters[ctas_per_sm][cluster_ctas_];
    params_ = ParamsOf(blocks, step.products.front().buffers, choice, ctas_per_sm);
    params_.holds_next = step.holds_next;
    params_.sends = step.inboxes.parts > 1;
    params_.inboxes = step.inboxes;
    int64_t clusters = AssignClusters(step.products, choice.slices, params_);
    int64_t batch = problem.batch;
    if (persistent_) {
      params_.ragged = RaggedOf(problem, choice.block_m, clusters);
      AddGroupTable(problem, Sm90SharedBytes(ctas_per_sm), &params_.plan);
      clusters = std::min<int64_t>(clusters * MaxBlocks(problem, choice.block_m), resident);
      batch = 1;
    } else if (problem.is_ragged()) {
      params_.listed = ListedOf(problem);
      batch = problem.m;
      // All loads depend on the list or the sizes, which come from the previous kernel.
      if (params_.listed.waits) params_.prologue_stages = 2;
    }
    // With several waves, the next kernel starts on the places that the last one leaves free.
    if (clusters * batch <= resident) params_.loads_until_next = LoadsUntilNext(params_.plan);
    grid_ = dim3(static_cast<unsigned>(clusters * cluster_ctas_), static_cast<unsigned>(batch));
    lhs_ = ShapeOfMatrix(problem.lhs, problem.batch * problem.lhs_rows(), problem.k,
                         params_.plan.lhs_rows, params_.plan.stage_atoms);
  }

  cudaError_t Launch(const Buffers* products, cudaStream_t stream) const override {
    const Buffers& first = *products;
    Params p = params_;
    p.original_lhs = first.lhs;
    p.permutation = first.permutation;
    p.epilogue.bias = first.bias;
    p.epilogue.residual = p.apply_lhs_scale ? first.lhs_scale : first.residual;
    p.ragged.sizes = p.listed.list = first.group_sizes;
    p.ragged.offset = p.listed.offset = first.group_offset;
    for (size_t i = 0; i < count_; ++i) {
      const Buffers& b = products[i];
      Product& own = p.products[i];
      own.packed = b.packed;
      own.scale = b.scale;
      own.zero = b.zero;
      own.index = b.index;
      own.out = b.out;
      p.units[i].data = b.unit;
      p.units[i].index = b.index;
    }
    const cudaError_t error = Encode(lhs_, first.lhs, &p.lhs);
    if (error != cudaSuccess) return error;
    const LaunchConfig config(grid_, ThreadsOf(persistent_), p.plan.shared_bytes, stream, pdl_,
                              cluster_ctas_);
    return LaunchFunction(config, function_, &p);
  }

 private:
  const size_t count_;  // of products
  const void* const function_;
  const int cluster_ctas_;
  const bool persistent_, pdl_;
  Params params_;
  dim3 grid_;
  TensorShape lhs_;
};

}  // namespace

cudaError_t Load(const void* function) {
  const cudaError_t error = PreferSharedMemory(function);
  return error == cudaSuccess ? AllowSharedMemory(function, Sm90SharedBytes(1)) : error;
}

cudaError_t Load(const PlannedStep& step, const Device& device,
                 std::unique_ptr<const KernelLaunch>* launch) {
  if (step.products.size() > kMaxProducts) return cudaErrorInvalidValue;
  const void* function = nullptr;
  const cudaError_t error =
      KernelOn(device, sm90_stream::KeyOf(step.problem, step.choice, device), &function);
  if (error == cudaSuccess) *launch = std::make_unique<StreamLaunch>(step, device, function);
  return error;
}

}  // namespace jaxlowbit::sm90_stream
