// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90_stream/select.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <tuple>

#include "cuda/kernels/number_costs.h"
#include "cuda/kernels/sm90_stream/costs.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm90_stream {
namespace {

// Slices per cluster are multiples of this: whole strips, since larger loads are faster.
int SliceStep(const QuantizedMatmul& problem) {
  return problem.epilogue.gated ? kPairSlices : kSlicesPerStrip;
}

// Clusters of the launch, over the whole batch.
int64_t NumClusters(const QuantizedMatmul& problem, int slices) {
  return CeilDiv(problem.strips() * kSlicesPerStrip, slices) * problem.batch;
}

Plan PlanOfChoice(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  return PlanOf(problem, choice.split_k, choice.slices, CtasPerSm(problem, device, choice));
}

Support SupportsGroups(const Plan& plan, const QuantizedMatmul& problem) {
  if (SupportsGroupSize(plan.stage_atoms, problem.group_size)) return {};
  return {"groups must divide its stages or be multiples of them"};
}

}  // namespace

Support SupportsProblem(const QuantizedMatmul& problem, const Device& device) {
  const int most = MaxRows(problem.bits, problem.scale);
  if (problem.m > most) return {"it takes up to " + std::to_string(most) + " rows of lhs"};
  if (problem.k % kAtom != 0) return {"k must be a multiple of 64"};
  if (problem.rounding != Rounding::kNone) {
    if (problem.m > kMaxRoundedRows) {
      return {"it rounds up to " + std::to_string(kMaxRoundedRows) + " rows of lhs"};
    }
    if (!device.can_compile()) {
      return {"instances that round are compiled where they run, and there is no compiler"};
    }
  }
  const Choice choice = Configure(problem, device, 0);
  if (choice.slices == 0) return {"its stages would not fit shared memory"};
  return SupportsGroups(PlanOfChoice(problem, device, choice), problem);
}

Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t) {
  if (choice.block_m != BlockM(problem.m)) return {"block_m is not its tile's for m"};
  if (std::find(std::begin(kClusterCtas), std::end(kClusterCtas), choice.split_k) ==
      std::end(kClusterCtas)) {
    return {"its clusters have 1, 2 or 4 CTAs"};
  }
  const int64_t most = std::min<int64_t>(kMaxClusterSlices, problem.strips() * kSlicesPerStrip);
  if (problem.epilogue.gated && choice.slices % kPairSlices != 0) {
    return {"slices are of pairs of strips"};
  }
  if (HasWholeStrips(problem.bits) && choice.slices % kSlicesPerStrip != 0) {
    return {"weights of this width are read in whole strips"};
  }
  if (choice.slices < 1 || choice.slices > most) return {"slices is beyond those of a cluster"};
  const Plan plan = PlanOfChoice(problem, device, choice);
  if (plan.num_stages < 2) return {"its stages would not fit shared memory"};
  if (IsOfBlocks(problem) && plan.stages < choice.split_k) return {"each CTA has a stage of k"};
  return SupportsGroups(plan, problem);
}

std::vector<Choice> Choices(const QuantizedMatmul& problem) {
  std::vector<Choice> choices;
  const int step = SliceStep(problem);
  for (int cluster_ctas : kClusterCtas) {
    for (int slices = step; slices <= kMaxClusterSlices; slices += step) {
      Choice choice;
      choice.kernel = Kernel::kQmmSm90Stream;
      choice.block_m = BlockM(problem.m);
      choice.split_k = cluster_ctas;
      choice.slices = slices;
      choices.push_back(choice);
    }
  }
  return choices;
}

Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t) {
  Choice best;
  double least = 0;
  for (const Choice& choice : Choices(problem)) {
    if (PlanOfChoice(problem, device, choice).num_stages < 2) continue;
    const double cost = Cost(problem, device, choice);
    if (best.slices > 0 && cost >= least) continue;
    least = cost;
    best = choice;
  }
  return best;
}

double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs) {
  const int cluster_ctas = choice.split_k, slices = choice.slices;
  const Plan plan = PlanOfChoice(problem, device, choice);
  const int64_t clusters = NumClusters(problem, slices);
  const int ctas_per_sm = CtasPerSm(problem, device, choice);
  const int64_t resident = std::max(1, device.clusters[ctas_per_sm][cluster_ctas]);
  const double kilobyte_per_slice = problem.k_blocks() * problem.bits / 8.0;
  const double load = slices * kilobyte_per_slice / cluster_ctas;
  const int tiles = static_cast<int>(CeilDiv(slices, plan.tile_slices));
  const double pairs = static_cast<double>(CeilDiv(plan.tile_slices, kSlicesPerWarp));
  const double busy = pairs * plan.warps_k / kWarps;
  const int first = problem.bits > 4 ? 3 : 0;
  const Costs::Rows& fit = costs.rows[first + (problem.m <= 8 ? 0 : problem.m <= 16 ? 1 : 2)];
  const double narrow = problem.bits < 4 ? costs.narrow[problem.bits - 1] : 1;
  // Additional time per kilobyte for decoding codebooks. The warps of one CTA do not hide the latency of these
  // instructions.
  const double numbers = NumbersAtom(problem) * 2 / problem.bits;
  const double waits = fit.two_ctas / fit.one_cta;
  // Loads of wide weights are larger if a warp has two atoms of a stage.
  const double copy = costs.copy * (problem.bits > 4 ? plan.warp_atoms : 1);
  const double copies =
      tiles * (plan.stages / static_cast<double>(cluster_ctas)) * (plan.tile_slices / 2.0 + 1);
  const auto lhs_tiles =
      static_cast<double>(tiles * CeilDiv(problem.k_blocks(), int64_t{cluster_ctas}));
  const double missing =
      costs.missing_row * lhs_tiles * static_cast<double>(plan.lhs_rows - problem.m);
  const double read_rate = costs.read_kilobytes * RelativeMemoryRate(device);
  const auto wave = [&](int64_t in_wave, int ctas) {
    const double filled =
        ctas == 1 ? busy : std::sqrt(busy);  // a second CTA's warps fill idle slots
    const double rate = (ctas == 1 ? fit.one_cta : fit.two_ctas) * narrow * filled;
    const double shallow = plan.num_stages == 2 ? fit.two : plan.num_stages == 3 ? fit.three : 1;
    const double found = load * numbers * (ctas == 1 ? waits : 1);
    const double multiplied = ctas * (load / rate * shallow + found + copy * copies + missing);
    const double read = static_cast<double>(in_wave * cluster_ctas) * load / read_rate;
    return std::max(multiplied, read);
  };
  // A full wave fills all resident slots. A last wave that is at most half full runs one CTA per SM.
  const int64_t full = clusters / resident, left = clusters % resident;
  const auto waves = static_cast<double>(CeilDiv(clusters, resident));
  const double computed =
      static_cast<double>(full) * wave(resident, ctas_per_sm) +
      (left == 0 ? 0 : wave(left, full > 0 && 2 * left <= resident ? 1 : ctas_per_sm));
  const bool two_ctas = ctas_per_sm > 1;
  const double idle = 1 - static_cast<double>(clusters * cluster_ctas) / device.num_sms;
  const double pdl = !problem.pdl ? 0
                     : two_ctas   ? costs.pdl_two_ctas
                                  : costs.pdl_one_cta + costs.pdl_idle * std::min(1.0, 2 * idle);
  // Persistent CTAs of ragged products measure alike: each tile finds its group and fills its ring.
  const double ends = (costs.tile * tiles + costs.wave) * waves;
  return computed + ends + fit.start + (two_ctas ? costs.two_ctas : 0) - pdl;
}

// If all CTAs can have an SM each, they request more than half of its shared memory (kExclusiveBytes).
int CtasPerSm(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  const bool one_cta = NumClusters(problem, choice.slices) <= device.clusters[1][choice.split_k];
  return one_cta ? 1 : kMaxCtasPerSm;
}

LhsPath LhsPathOf(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  return PlanOfChoice(problem, device, choice).lhs_path;
}

bool MayJoin(const QuantizedMatmul& a, const QuantizedMatmul& b) {
  const auto is_plain = [](const QuantizedMatmul& p) {
    return !p.is_ragged() && !p.transposed && p.permuted_parts == 0 && !p.epilogue.gated &&
           p.epilogue.activation == Activation::kNone;
  };
  const auto form = [](const QuantizedMatmul& p) {
    return std::tie(p.batch, p.m, p.k, p.bits, p.codebook, p.group_size, p.lhs, p.scale, p.out,
                    p.zero, p.scale_accumulators, p.accumulate_float16);
  };
  return is_plain(a) && is_plain(b) && form(a) == form(b);
}

QuantizedMatmul Join(const QuantizedMatmul& a, const QuantizedMatmul& b) {
  QuantizedMatmul joined = a;
  joined.n = (a.n_blocks() + b.n_blocks()) * kAtom;
  return joined;
}

}  // namespace jaxlowbit::sm90_stream
