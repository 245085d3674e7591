// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90/plan.h"

#include <algorithm>

#include "cuda/problem.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm90 {

Plan PlanOf(const QuantizedMatmul& problem, const TileShape& tile) {
  Plan plan = {};
  const int64_t stage_k = tile.stage_atoms * kAtom, size = problem.group_size;
  plan.stages = static_cast<int>(CeilDiv(problem.k_blocks(), tile.stage_atoms));
  // A stage may begin inside a group.
  plan.stage_groups = static_cast<int>(size < 0              ? 1
                                       : stage_k % size == 0 ? stage_k / size
                                       : size % stage_k == 0 ? 1
                                                             : stage_k / size + 2);
  // Strips of the gate and of up are loaded separately, so one-byte scales or zeros of a strip are padded to
  // kTmaTarget.
  const bool bytes = problem.zero_bytes() == 1 || problem.scale_bytes() == 1;
  if (problem.epilogue.gated && bytes && plan.stage_groups % 2 != 0) ++plan.stage_groups;
  const int per_group = tile.cta_strips() * plan.stage_groups * static_cast<int>(kAtom);
  plan.bytes = {
      tile.stage_atoms * tile.m * static_cast<int>(kAtom * SizeOf(problem.lhs)),
      tile.stage_atoms * tile.cta_strips() * static_cast<int>(kAtom * kAtom) * problem.bits / 8,
      per_group * static_cast<int>(problem.scale_bytes()),
      per_group * static_cast<int>(problem.zero_bytes())};
  plan.slot_bytes = plan.bytes.lhs + plan.bytes.packed;
  plan.scales_bytes =
      static_cast<int>(CeilDiv(plan.bytes.scales + plan.bytes.zeros, kTmaTarget)) * kTmaTarget;
  plan.ring = static_cast<int>(CeilDiv(kBarriersBytes, kTmaAlignment)) * kTmaAlignment +
              tile.warpgroups * ResultBytes(tile);
  if (problem.is_ragged()) plan.groups_bytes = GroupTableBytes(problem);
  const int fit = (Sm90SharedBytes(tile.ctas_per_sm) - plan.ring - plan.groups_bytes) /
                  (plan.slot_bytes + plan.scales_bytes);
  plan.num_stages = std::min(fit, kMaxStages);
  plan.scales = plan.ring + plan.num_stages * plan.slot_bytes;
  return plan;
}

StreamK StreamKOf(const QuantizedMatmul& problem, const TileShape& tile, int peers, int splits,
                  int num_sms) {
  const int64_t tiles = CeilDiv(problem.m, tile.m) *
                        CeilDiv(problem.strips(), tile.cta_strips() * peers) * problem.batch;
  const int64_t resident = num_sms * tile.ctas_per_sm / peers;
  StreamK schedule = {resident > 0 ? resident : 1, tiles, 0, splits};
  if (splits > 1) schedule.whole_tiles = tiles / schedule.resident * schedule.resident;
  schedule.tail_tiles = tiles - schedule.whole_tiles;
  return schedule;
}

}  // namespace jaxlowbit::sm90
