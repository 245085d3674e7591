// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90/select.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cuda/kernels/number_costs.h"
#include "cuda/kernels/sm90/costs.h"
#include "cuda/kernels/sm90/instances.h"
#include "cuda/kernels/sm90/plan.h"
#include "cuda/limits.h"

namespace jaxlowbit::sm90 {
namespace {

StreamK ScheduleOf(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  return StreamKOf(problem, kTiles[choice.tile], choice.peers, choice.split_k, device.num_sms);
}

// Whether an int8 lhs has one integer sum over all of k: one scale per channel, or integer scales.
bool HasSingleAccumulator(const QuantizedMatmul& problem) {
  return problem.lhs == ElementType::kInt8 &&
         (problem.groups() == 1 || problem.scale == ElementType::kInt8);
}

// Additional cost of splitting k with an 8-bit lhs, compared to other lhs, in microseconds: once, and per part after
// the first.
constexpr double kByteSplit = 2, kBytePart = 0.5;

// Relative time per atom if a multiprocessor runs one CTA instead of two: loads and products do not overlap.
constexpr double kByteOneCta = 1.2;

// Microseconds per atom with an 8-bit lhs on a hot H200, including the starts and ends of tiles: lines fitted to the
// times in docs/measurements/activations_8_bit.md.
double ByteAtom(const QuantizedMatmul& problem, double rows, double strips) {
  struct Line {
    double base, row;  // per stage of up to two strips; per row
  };
  const bool wide = problem.bits > 4, groups_of_64 = problem.group_size == kAtom;
  const bool zeros = problem.zero != ZeroKind::kNone;
  const Line line = problem.lhs != ElementType::kInt8
                        ? (problem.groups() == 1 ? Line{0.2, 0.0027} : Line{0.5, 0.0024})
                    : HasSingleAccumulator(problem)
                        ? (problem.scale == ElementType::kInt8 ? Line{0.33, 0.00158}
                           : wide                              ? Line{0.245, 0.0021}
                                                               : Line{zeros ? 0.3 : 0.23, 0.00178})
                        : Line{(groups_of_64 ? 0.54 : 0.376) + (wide || zeros ? 0.05 : 0), 0.0021};
  return (line.base * std::max(strips, 2.0) + line.row * rows * strips) / 4;
}

// Additional time per atom and strip for MXFP4 and NVFP4 in tiles that load their scales once per stage (kCodebookAtoms
// in number_costs.h). Up to 16 rows, qmm_sm90_stream is faster and both kernels use the same number.
constexpr double kMicroscaledAtom = 0.015;

// Whether the instance is available or can be compiled. SupportsOnHopper has checked formats whose instances are all
// compiled.
bool HasInstance(const QuantizedMatmul& problem, const Device& device, int tile) {
  const InstanceKey key = KeyOf(problem, tile);
  return IsPrebuilt(key) || !IsPrebuiltFormat(key) || device.can_compile();
}

}  // namespace

Support SupportsProblem(const QuantizedMatmul& problem, const Device&) {
  if (problem.k % 8 != 0) return {"k must be a multiple of 8"};
  if (Is8Bit(problem.lhs)) {
    if (problem.k % 16 != 0) return {"k of an lhs of 8 bits must be a multiple of 16"};
    if (problem.k > 1 << 17)
      return {"sums over k=" + std::to_string(problem.k) +
              " may leave int32, which holds 2^17 products of 8 bits"};
    if (problem.is_integer_matmul() && !HasSingleAccumulator(problem)) {
      return {"groups with float scales have no sum of integers"};
    }
    if (problem.group_size > 0 && problem.group_size != kAtom &&
        problem.group_size % (2 * kAtom) != 0) {
      return {
          "with 8-bit lhs groups must be 64, a multiple of 128 or whole columns, the format has " +
          std::to_string(problem.group_size)};
    }
  }
  const bool groups_of_16 =
      problem.group_size == 16 && SupportsGroupsOf16(problem.codebook, problem.scale_bytes());
  if (problem.group_size > 0 && problem.group_size != 32 && problem.group_size % kAtom != 0 &&
      !groups_of_16) {
    return {"groups must be of 32, or of multiples of 64"};
  }
  constexpr int64_t kLimit = int64_t{1} << 31;  // positions and tiles are 32-bit numbers
  if (problem.m >= kLimit ||
      problem.batch * CeilDiv(problem.m, kMinTileM) * problem.strips() >= kLimit) {
    return {"it has more than 2^31 tiles"};
  }
  const auto fits = [&](const TileShape& tile) { return PlanOf(problem, tile).num_stages >= 2; };
  if (std::none_of(std::begin(kTiles), std::end(kTiles), fits)) {
    return {"its stages would not fit shared memory"};
  }
  return {};
}

Support SupportsChoice(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                       int64_t workspace_bytes) {
  if (choice.tile < 0 || choice.tile >= kNumTiles) return {"tile is none of its tiles"};
  const TileShape& tile = kTiles[choice.tile];
  if (choice.block_m != tile.m) return {"block_m is not its tile's"};
  if (!Is8Bit(problem.lhs) && choice.tile >= kFloatTiles) {
    return {"its tile is for an lhs of 8 bits"};
  }
  if (Is8Bit(problem.lhs) &&
      !tile.supports_8bit_lhs(HasSingleAccumulator(problem), problem.zero != ZeroKind::kNone)) {
    return {"its tile has no room for group sums, or for zeros"};
  }
  // Do not JIT-compile for small m.
  if (choice.tile >= kPrebuiltTiles && problem.m <= kMinTileM) return {"its tile is for more rows"};
  if (std::find(std::begin(kPeers), std::end(kPeers), choice.peers) == std::end(kPeers)) {
    return {"its clusters have 1 or 2 CTAs"};
  }
  if (problem.epilogue.gated && !tile.supports_gated())
    return {"its tiles split a gate and its up"};
  const Plan plan = PlanOf(problem, tile);
  if (plan.num_stages < 2) return {"its stages would not fit shared memory"};
  if (choice.split_k < 1 || choice.split_k > std::min(kMaxSplits, plan.stages)) {
    return {"split_k is beyond its stages"};
  }
  if (choice.split_k > 1) {
    if (choice.peers > 1) return {"peers share whole tiles"};
    const StreamK schedule = ScheduleOf(problem, device, choice);
    if (schedule.tail_tiles == 0) return {"no tiles are left to be divided"};
    // For small m, a tile has more rows than the caller's workspace.
    const int64_t rows = problem.batch * problem.weights_per_element() * problem.m;
    if (schedule.workspace_bytes(tile) >
        std::min(workspace_bytes, MaxPartialSumsBytes(rows, problem.n))) {
      return {"its partial sums do not fit the workspace"};
    }
  }
  if (!HasInstance(problem, device, choice.tile)) {
    return {"its tile is compiled where it runs, and there is no compiler"};
  }
  return {};
}

std::vector<Choice> Choices(const QuantizedMatmul&) {
  std::vector<Choice> choices;
  for (int tile = 0; tile < kNumTiles; ++tile) {
    for (int peers : kPeers) {
      for (int split_k = 1; split_k <= (peers > 1 ? 1 : kMaxSplits); ++split_k) {
        Choice choice;
        choice.kernel = Kernel::kQmmSm90;
        choice.block_m = kTiles[tile].m;
        choice.split_k = split_k;
        choice.tile = tile;
        choice.peers = peers;
        choices.push_back(choice);
      }
    }
  }
  return choices;
}

Choice Configure(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes) {
  Choice best;
  double least = 0;
  for (const Choice& choice : Choices(problem)) {
    const double cost = Cost(problem, device, choice);
    if (best.kernel == Kernel::kQmmSm90 && cost >= least) continue;
    // Checked last, since it may load the compiler.
    if (!SupportsChoice(choice, problem, device, workspace_bytes)) continue;
    least = cost;
    best = choice;
  }
  return best;
}

double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const Costs& costs) {
  const TileShape& tile = kTiles[choice.tile];
  const Costs::Tile& fit = costs.tiles[choice.tile];
  const StreamK schedule = ScheduleOf(problem, device, choice);
  const int64_t stages = CeilDiv(problem.k_blocks(), tile.stage_atoms);
  // Tiles that do not hide dequantization save instructions if every stage is inside one group (every atom, in formats
  // with groups of 16): scales are fused, or at least loaded once.
  const bool by_atom = SupportsGroupsOf16(problem.codebook, problem.scale_bytes());
  const bool once = tile.m <= 128 && problem.scale == problem.lhs && problem.group_size > 0 &&
                    problem.group_size % (by_atom ? kAtom : 2 * kAtom) == 0;
  const double kind = problem.bits > 4                     ? fit.wide
                      : !once                              ? 1
                      : problem.zero == ZeroKind::kInteger ? costs.loaded_once
                                                           : costs.fused;
  const bool bytes = Is8Bit(problem.lhs);
  const bool loads_once =
      problem.m > 16 && std::max<int64_t>(tile.m, problem.m) <= kMaxMicroscaledRows;
  const double numbers = loads_once ? NumbersAtom(problem, kMicroscaledAtom) : NumbersAtom(problem);
  const auto rounds = [&](int64_t tasks, int splits) {
    if (tasks == 0) return 0.0;
    const bool one_cta = tile.ctas_per_sm == 1 || tasks * choice.peers <= device.num_sms;
    const double strips = tile.cta_strips() * (one_cta ? 1 : 2);
    const double atom = bytes ? ByteAtom(problem, tile.m, strips) *
                                    (one_cta && tile.ctas_per_sm > 1 ? kByteOneCta : 1)
                              : (one_cta ? fit.one_cta : fit.two_ctas) * kind + numbers * strips;
    const int64_t atoms = std::min(problem.k_blocks(), CeilDiv(stages, splits) * tile.stage_atoms);
    return static_cast<double>(CeilDiv(tasks, schedule.resident)) *
           (static_cast<double>(atoms) * atom + (bytes ? 0 : fit.round));
  };
  const double partial_sums =
      1e-6 * static_cast<double>(schedule.workspace_bytes(tile)) * fit.megabyte;
  const double read = static_cast<double>(problem.strips() * problem.k_blocks()) * kAtom * kAtom *
                      problem.bits / 8 / (costs.read_bytes * RelativeMemoryRate(device));
  const double computed = rounds(schedule.whole_tiles, 1) +
                          rounds(schedule.tail_tiles * schedule.splits, schedule.splits);
  const double cost = fit.once + std::max(computed, read) +
                      (schedule.splits > 1 ? fit.split + partial_sums : 0) +
                      (choice.peers > 1 ? fit.peers : 0);
  if (bytes) {
    return cost + (schedule.splits > 1 ? kByteSplit + kBytePart * (schedule.splits - 1) : 0);
  }
  return cost * (1 + fit.throttling * std::log2(std::max(1.0, cost / costs.throttle_start)));
}

}  // namespace jaxlowbit::sm90
