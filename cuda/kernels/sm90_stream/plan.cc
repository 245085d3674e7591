// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90_stream/plan.h"

#include <algorithm>

#include "cuda/gpu.h"
#include "cuda/problem.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm90_stream {

namespace {

// Maximum strips that a tile touches.
int StageStrips(const Plan& plan) {
  const bool whole = plan.slices % kSlicesPerStrip == 0 && plan.tile_slices % kSlicesPerStrip == 0;
  const int extra =
      whole ? 0 : 2 * (kSlicesPerStrip - 1);  // a tile may begin and end inside strips
  return (plan.tile_slices + extra) / kSlicesPerStrip;
}

// Atoms per stage: atoms per warp times the parts of k. A warp has two atoms if activations leave room for several
// stages and a stage has at most 16 KiB per strip. Below 4 bits it has four, which saves 10 % of the instructions,
// unless that delays the first stage: a stage must be small, or the CTA must have many.
int StageAtoms(const QuantizedMatmul& problem, const Plan& plan, int block_m) {
  constexpr int kSmallBytes = 8 * 1024, kManyStages = 8;
  const auto atoms_of = [&](int warp_atoms) {
    const int limit = std::min(128 / block_m, problem.bits < 4 ? 16 : problem.bits == 4 ? 8 : 4);
    return std::max(plan.warps_k, std::min(warp_atoms * plan.warps_k, limit));
  };
  const int atoms = atoms_of(MaxWarpAtoms(problem.bits, block_m));
  const int64_t bytes = int64_t{atoms} * plan.tile_slices * kSliceRows * kAtom * problem.bits / 8;
  const int64_t stages = CeilDiv(problem.k_blocks(), int64_t{atoms} << plan.cluster_shift);
  const bool starts_soon = bytes <= kSmallBytes || stages >= kManyStages;
  const bool has_lanes = plan.stage_strips * (atoms + 2) <= 32;  // of the producer (fill.cuh)
  const bool fits = starts_soon && has_lanes && SupportsGroupSize(atoms, problem.group_size);
  return fits ? atoms : atoms_of(2);
}

// Slices of a tile: whole pairs of strips if gated, or whole strips for widths that need them.
int TileSlices(const QuantizedMatmul& problem, int slices) {
  const int unit = problem.epilogue.gated         ? kPairSlices
                   : HasWholeStrips(problem.bits) ? kSlicesPerStrip
                                                  : 1;
  const int64_t tiles = CeilDiv(slices, kMaxTileSlices);
  return static_cast<int>(CeilDiv(CeilDiv(slices, tiles), unit)) * unit;
}

// Rows of scales in a stage.
int StageGroups(const QuantizedMatmul& problem, int64_t stage_k) {
  const int64_t size = problem.group_size, groups = size < 0 ? 1 : CeilDiv(stage_k, size);
  const bool two_levels = HasTwoLevels(problem.scale);
  return static_cast<int>(groups + (two_levels ? CeilDiv(stage_k, kSuperBlock) * kFloatRows : 0));
}

}  // namespace

Plan PlanOf(const QuantizedMatmul& problem, int cluster_ctas, int slices, int ctas_per_sm) {
  Plan plan = {};
  while (2 << plan.cluster_shift <= cluster_ctas) ++plan.cluster_shift;
  plan.slices = slices;
  plan.tile_slices = TileSlices(problem, slices);
  const int block_m = BlockM(problem.m);
  const int pairs = static_cast<int>(CeilDiv(plan.tile_slices, kSlicesPerWarp));
  plan.warps_k = 1;
  // Partial sums of more warps would leave too little shared memory for stages.
  const int limit = block_m == 32 ? 4 : kWarps;
  while (pairs * plan.warps_k * 2 <= kWarps && plan.warps_k * 2 <= limit) plan.warps_k *= 2;
  plan.stage_strips = StageStrips(plan);
  plan.stage_atoms = StageAtoms(problem, plan, block_m);
  plan.warp_atoms = plan.stage_atoms / plan.warps_k;
  while (1 << plan.stage_shift < plan.stage_atoms) ++plan.stage_shift;
  plan.stages = static_cast<int>(CeilDiv(problem.k_blocks(), plan.stage_atoms));
  const int64_t stage_k = plan.stage_atoms * kAtom;
  plan.stage_groups = StageGroups(problem, stage_k);
  const int per_slice = kSliceRows * static_cast<int>(kAtom) * problem.bits / 8;
  const int per_group = plan.stage_strips * plan.stage_groups * static_cast<int>(kAtom);
  const int cluster = 1 << plan.cluster_shift;
  const int64_t row_bytes = problem.m * 2;  // per column of lhs
  const int64_t gathered_bytes = CeilDiv(plan.stages, cluster) * stage_k * row_bytes;
  const int64_t gather_bytes = gathered_bytes + problem.k * row_bytes;
  const bool gathers = problem.permuted_parts > 0 && problem.lhs_aligned && block_m == 8 &&
                       gather_bytes <= kMaxGatheredBytes;
  plan.lhs_path = problem.rounding != Rounding::kNone ? LhsPath::kRounds
                  : gathers                           ? LhsPath::kGathers
                                                      : LhsPath::kStages;
  const bool in_stages = plan.lhs_path == LhsPath::kStages;
  // For m = 1 a tensor-map tile has a single row, since out-of-bounds rows slow down TMA.
  plan.lhs_rows = !in_stages || problem.m == 1 ? static_cast<int>(problem.m) : block_m;
  plan.bytes = {in_stages ? plan.stage_atoms * plan.lhs_rows * static_cast<int>(kAtom) * 2 : 0,
                plan.stage_atoms * plan.tile_slices * per_slice,
                per_group * static_cast<int>(problem.scale_bytes()),
                per_group * static_cast<int>(problem.zero_bytes())};
  plan.slot_bytes = static_cast<int>(CeilDiv(plan.bytes.total(), kTmaAlignment) * kTmaAlignment);
  while (cluster << plan.owned_shift < plan.tile_slices) ++plan.owned_shift;
  // Every warp sends its partial sums of a slice: 16 channels x block_m in float32.
  const int senders = cluster * plan.warps_k;
  plan.sums_bytes = (senders << plan.owned_shift) * kSliceRows * block_m * 4;
  plan.gathered = kBarriersBytes + plan.sums_bytes * (IsOfBlocks(problem) ? 2 : 1);
  plan.whole_rows = plan.gathered + (in_stages ? 0 : static_cast<int>(gathered_bytes));
  const int64_t before = gathers ? plan.gathered + gather_bytes : plan.whole_rows;
  plan.ring = static_cast<int>(CeilDiv(before, kTmaAlignment) * kTmaAlignment);
  const bool exclusive = ctas_per_sm == 1;
  const bool leaves_room = plan.ring + kExclusiveStages * plan.slot_bytes <= kExclusiveBytes;
  const int bytes = exclusive && leaves_room ? kExclusiveBytes : Sm90SharedBytes(ctas_per_sm);
  plan.num_stages = std::min({IsOfBlocks(problem) ? kMaxRaggedStages : kMaxStages,
                              (bytes - plan.ring) / plan.slot_bytes,
                              std::max(2, kMaxPackedBytes / plan.bytes.packed)});
  if (plan.lhs_path == LhsPath::kRounds && gathered_bytes > kMaxGatheredBytes) plan.num_stages = 0;
  plan.shared_bytes = exclusive ? bytes : plan.ring + plan.num_stages * plan.slot_bytes;
  return plan;
}

}  // namespace jaxlowbit::sm90_stream
