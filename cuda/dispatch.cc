// SPDX-License-Identifier: Apache-2.0

#include "cuda/dispatch.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>

#include "cuda/extents.h"
#include "cuda/qmm_sm80/config.h"
#include "cuda/qmm_sm90/config.h"
#include "cuda/qmm_sm90_stream/config.h"
#include "cuda/tuned.h"

namespace jaxlowbit {
namespace {

bool IsOneOf(int value, std::initializer_list<int> allowed) {
  return std::find(allowed.begin(), allowed.end(), value) != allowed.end();
}

int64_t WorkspaceBytes(const QuantizedMatmul& problem, int split_k) {
  return split_k * problem.batch * problem.m * problem.weights_per_element() *
         CeilDiv(problem.out_columns(), kAtom) * kAtom * static_cast<int64_t>(sizeof(float));
}

// CTAs of a tile that one multiprocessor holds at a time.
int64_t ResidentCtas(const QuantizedMatmul& problem, const Device& device, int block_m) {
  constexpr int kReservedBytes = 1024;  // shared memory the system takes per CTA
  const int bytes = qmm_sm80::SharedBytes(
      block_m, problem.bits, problem.group_size, static_cast<int>(problem.scale_bytes()),
      static_cast<int>(problem.zero_bytes()), problem.transposed);
  return std::clamp(device.shared_bytes_per_sm / (bytes + kReservedBytes), 1,
                    qmm_sm80::CtasByRegisters(block_m, qmm_sm80::SumBytes(problem)));
}

// Microseconds of a tile and a split of k. The constants are fits to sweeps of both on an H200
// (docs/kernels/qmm_sm80.md).
double Sm80Cost(const QuantizedMatmul& problem, const Device& device, int block_m, int split_k) {
  struct Fit {
    double stage;   // of a CTA that has a multiprocessor to itself
    double shared;  // of it, what CTAs beside each other cannot overlap
    double reduce;  // the kernel that adds the parts
  };
  constexpr Fit kSmall = {0.775, 0.54, 3.1}, kMiddle = {0.85, 0.65, 2}, kLarge = {1.4, 0.5, 2};
  const Fit fit = block_m == 64 ? kLarge : block_m == 32 ? kMiddle : kSmall;
  constexpr double kStart = 1;  // filling the ring, in stages
  const int64_t tiles = CeilDiv(problem.m, block_m) * qmm_sm80::OutTiles(problem) * problem.batch;
  const int64_t stages = CeilDiv(problem.lhs_columns(), qmm_sm80::BlockK(problem.bits));
  // The multiprocessor with the most CTAs is the last one to end.
  const int64_t ctas = CeilDiv(tiles * split_k, device.num_sms);
  const int64_t beside = std::min(ctas, ResidentCtas(problem, device, block_m));
  // Partial sums are 512 bytes per token, written and read, against 8 KiB of codes in a stage; they
  // stay in L2, at about twice the rate.
  const double sums = split_k > 1 ? block_m / 16.0 : 0;
  const double cta = static_cast<double>(CeilDiv(stages, split_k)) + kStart + sums;
  const double overlap = fit.shared + (1 - fit.shared) / static_cast<double>(beside);
  return static_cast<double>(ctas) * cta * overlap * fit.stage + (split_k > 1 ? fit.reduce : 0);
}

Choice ConfigureSm80(const QuantizedMatmul& problem, const Device& device,
                     int64_t workspace_bytes) {
  Choice choice;
  choice.block_m = problem.m > 32 && !problem.scale_sums ? 64
                   : problem.m > 16                      ? 32
                   : problem.m > 8                       ? 16
                                                         : 8;
  double best = Sm80Cost(problem, device, choice.block_m, 1);
  const int64_t stages = CeilDiv(problem.lhs_columns(), qmm_sm80::BlockK(problem.bits));
  const int most = static_cast<int>(std::min<int64_t>(kMaxSplitK, stages));
  const auto consider = [&](int block_m) {
    for (int split_k = 1; split_k <= most; ++split_k) {
      if (split_k > 1 && WorkspaceBytes(problem, split_k) > workspace_bytes) break;
      const double cost = Sm80Cost(problem, device, block_m, split_k);
      if (cost >= best) continue;
      best = cost;
      choice.block_m = block_m;
      choice.split_k = split_k;
    }
  };
  consider(choice.block_m);
  // Two small tiles occupy a device better than a large one where a weight is small.
  if (choice.block_m == 64 && problem.m <= 64 && !problem.transposed) consider(32);
  return choice;
}

// Of the whole batch.
int64_t StreamClusters(const QuantizedMatmul& problem, int slices) {
  return CeilDiv(problem.strips() * qmm_sm90_stream::kSlicesPerStrip, slices) * problem.batch;
}

qmm_sm90_stream::Plan StreamPlan(const QuantizedMatmul& problem, const Device& device,
                                 const Choice& choice) {
  return qmm_sm90_stream::PlanOf(problem, choice.split_k, choice.slices,
                                 StreamCtasPerSm(problem, device, choice));
}

// Microseconds that qmm_sm90_stream takes. The constants are fits to sweeps of the two choices on an
// H200 (docs/kernels/qmm_sm90_stream.md); of another device they rank choices all the same.
double StreamCost(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  namespace stream = qmm_sm90_stream;
  const int cluster_ctas = choice.split_k, slices = choice.slices;
  const stream::Plan plan = StreamPlan(problem, device, choice);
  const int64_t clusters = StreamClusters(problem, slices);
  const int ctas_per_sm = StreamCtasPerSm(problem, device, choice);
  const int64_t resident = std::max(1, device.clusters[ctas_per_sm][cluster_ctas]);
  const double kilobyte_per_slice = problem.k_blocks() * problem.bits / 8.0;
  const double load = slices * kilobyte_per_slice / cluster_ctas;
  const int tiles = static_cast<int>(CeilDiv(slices, plan.tile_slices));
  const double pairs = static_cast<double>(CeilDiv(plan.tile_slices, stream::kSlicesPerWarp));
  const double busy = pairs * plan.warps_k / stream::kWarps;
  struct Fit {
    double alone, beside;  // kilobytes per microsecond of a multiprocessor with one CTA, with two
    double two, three;     // a ring of so many stages, over a deeper one
    double start;
  };
  const Fit fit = problem.bits == 8 ? Fit{37, 52, 1.18, 1.04, 1.1}
                  : problem.m <= 8  ? Fit{33, 37, 1.18, 1.04, 1.1}
                  : problem.m <= 16 ? Fit{27.5, 33, 1.18, 1.04, 1.1}
                                    : Fit{17.2, 18.8, 1, 1, 2.2};
  // Copies of 8 bits are of more bytes where a warp has two atoms of a stage.
  const double copy = 0.0055 * (problem.bits == 8 ? plan.warp_atoms : 1);
  const double copies =
      tiles * (plan.stages / static_cast<double>(cluster_ctas)) * (plan.tile_slices / 2.0 + 1);
  constexpr double kTile = 2, kWave = 0.9, kBeside = 0.7;
  constexpr double kReadKilobytes = 4100;  // of weights, at most, in a microsecond
  // What starting early gains.
  constexpr double kEarlyAlone = 1.4, kEarlyBeside = 2.2;
  constexpr double kMissingRow = 0.0006;  // of a box of activations: one that does not exist
  const auto boxes =
      static_cast<double>(tiles * CeilDiv(problem.k_blocks(), int64_t{cluster_ctas}));
  const double missing = kMissingRow * boxes * static_cast<double>(plan.lhs_rows - problem.m);
  // As many clusters as run at a time, or of what is left half of them, a CTA on each multiprocessor.
  const auto wave = [&](int beside) {
    const double idle = beside == 1 ? busy : std::sqrt(busy);  // warps of another CTA fill in
    const double rate = (beside == 1 ? fit.alone : fit.beside) * idle;
    const double shallow = plan.num_stages == 2 ? fit.two : plan.num_stages == 3 ? fit.three : 1;
    return beside * (load / rate * shallow + copy * copies + missing) + kTile * tiles + kWave;
  };
  const int64_t full = clusters / resident, left = clusters % resident;
  const double computed =
      static_cast<double>(full) * wave(ctas_per_sm) +
      (left == 0 ? 0 : wave(full > 0 && 2 * left <= resident ? 1 : ctas_per_sm));
  const double read = static_cast<double>(problem.strips() * problem.batch) *
                      stream::kSlicesPerStrip * kilobyte_per_slice / kReadKilobytes;
  const bool beside = ctas_per_sm > 1;
  const double early = !problem.early_start ? 0 : beside ? kEarlyBeside : kEarlyAlone;
  return std::max(computed, read) + fit.start + (beside ? kBeside : 0) - early;
}

// Clusters of whole strips, whose copies are the largest.
Choice ConfigureStream(const QuantizedMatmul& problem, const Device& device) {
  namespace stream = qmm_sm90_stream;
  Choice choice;
  choice.kernel = Kernel::kQmmSm90Stream;
  choice.block_m = stream::TileTokens(problem.m);
  // At least, and from one choice to the next.
  const int step = stream::SliceStep(problem);
  double best = 0;
  for (int cluster_ctas : {1, 2, 4}) {
    for (int slices = step; slices <= stream::kMaxClusterSlices; slices += step) {
      Choice other = choice;
      other.split_k = cluster_ctas;
      other.slices = slices;
      if (StreamPlan(problem, device, other).num_stages < 2) continue;
      const double cost = StreamCost(problem, device, other);
      if (choice.slices > 0 && cost >= best) continue;
      best = cost;
      choice = other;
    }
  }
  return choice;
}

qmm_sm90::Division Sm90Division(const QuantizedMatmul& problem, const Device& device,
                                const Choice& choice) {
  return qmm_sm90::DivisionOf(problem, qmm_sm90::kTiles[choice.tile], choice.mates, choice.split_k,
                              device.num_sms);
}

std::string UnsupportedSm90(const Choice& choice, const QuantizedMatmul& problem,
                            const Device& device, int64_t workspace_bytes) {
  namespace sm90 = qmm_sm90;
  if (choice.tile < 0 || choice.tile >= sm90::kNumTiles) return "tile is none of its tiles";
  const sm90::TileShape& tile = sm90::kTiles[choice.tile];
  if (choice.block_m != tile.tokens) return "block_m is not its tile's";
  if (!IsOneOf(choice.mates, {1, 2})) return "its clusters have 1 or 2 CTAs";
  if (problem.epilogue.gated && !tile.takes_gated()) return "its tiles split a gate and its up";
  const sm90::Plan plan = sm90::PlanOf(problem, tile);
  if (plan.num_stages < 2) return "its stages would not fit shared memory";
  if (choice.split_k < 1 || choice.split_k > std::min(sm90::kMaxParts, plan.stages)) {
    return "split_k is beyond its stages";
  }
  if (choice.split_k == 1) return "";
  if (choice.mates > 1) return "mates share whole tiles";
  const sm90::Division division = Sm90Division(problem, device, choice);
  if (division.divided_tiles == 0) return "no tiles are left to be divided";
  if (division.workspace_bytes(tile) > workspace_bytes) {
    return "its partial sums do not fit the workspace";
  }
  return "";
}

// Microseconds that qmm_sm90 takes. The constants are fits to sweeps of tiles and splits on an H200
// (docs/kernels/qmm_sm90.md); of another device they rank choices all the same.
double Sm90Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  struct Fit {
    double alone, beside;  // an atom of a tile, in a CTA that has a multiprocessor to itself or not
    double round;          // the beginning and the end of a tile
    double once;           // the beginning and the end of the kernel
    double split;          // the kernel that adds parts
    double megabyte;       // of parts
    double mates;          // sharing activations, over not
    double wide;           // an atom of 8 bits, over one of 4
    double heat;           // whenever the time doubles, as clocks fall
  };
  constexpr Fit kFits[] = {{0.651, 0, 2.86, 1.0, 1.9, 0.31, -0.75, 1.06, 0.02},
                           {0.371, 0, 2.43, 1.0, 1.5, 0.33, 0.31, 1.06, 0.045},
                           {0.242, 0.296, 1.09, 1.9, 0.8, 0.42, 0.64, 0.98, 0},
                           {0.308, 0.475, 0.97, 2.5, 1.1, 0.35, 0.11, 1.3, 0},
                           {0.268, 0.378, 0.76, 2.5, 0.9, 0.55, 0.46, 0.98, 0},
                           {0.52, 0, 2.43, 1.0, 1.5, 0.33, 0.31, 1.06, 0.045},
                           {0.241, 0, 1.91, 1.4, 0.8, 0.39, 0.67, 1.06, 0}};
  static_assert(std::size(kFits) == qmm_sm90::kNumTiles);
  const Fit& fit = kFits[choice.tile];
  const qmm_sm90::TileShape& tile = qmm_sm90::kTiles[choice.tile];
  const qmm_sm90::Division division = Sm90Division(problem, device, choice);
  const int64_t stages = CeilDiv(problem.k_blocks(), tile.stage_atoms);
  // Of groups that stages lie in, tiles that do not hide it dequantize in fewer instructions: scales are fused,
  // or at least loaded once a stage.
  const bool once = tile.tokens <= 128 && problem.scale == problem.lhs && problem.group_size > 0 &&
                    problem.group_size % (2 * kAtom) == 0;
  constexpr double kFused = 0.94, kLoadedOnce = 0.97;
  const double kind = problem.bits == 8                    ? fit.wide
                      : !once                              ? 1
                      : problem.zero == ZeroKind::kInteger ? kLoadedOnce
                                                           : kFused;
  const auto rounds = [&](int64_t tasks, int parts) {
    if (tasks == 0) return 0.0;
    const bool alone = tile.ctas_per_sm == 1 || tasks * choice.mates <= device.num_sms;
    const double atom = (alone ? fit.alone : fit.beside) * kind;
    const int64_t atoms = std::min(problem.k_blocks(), CeilDiv(stages, parts) * tile.stage_atoms);
    return static_cast<double>(CeilDiv(tasks, division.resident)) *
           (static_cast<double>(atoms) * atom + fit.round);
  };
  const double parts = 1e-6 * static_cast<double>(division.workspace_bytes(tile)) * fit.megabyte;
  constexpr double kReadBytes = 4.2e6;  // of weights, at most, in a microsecond
  const double read = static_cast<double>(problem.strips() * problem.k_blocks()) * kAtom * kAtom *
                      problem.bits / 8 / kReadBytes;
  const double computed = rounds(division.whole_tiles, 1) +
                          rounds(division.divided_tiles * division.parts, division.parts);
  const double cost = fit.once + std::max(computed, read) +
                      (division.parts > 1 ? fit.split + parts : 0) +
                      (choice.mates > 1 ? fit.mates : 0);
  constexpr double kCool = 32;
  return cost * (1 + fit.heat * std::log2(std::max(1.0, cost / kCool)));
}

Choice ConfigureSm90(const QuantizedMatmul& problem, const Device& device,
                     int64_t workspace_bytes) {
  namespace sm90 = qmm_sm90;
  Choice choice;
  choice.kernel = Kernel::kQmmSm90;
  double best = 0;
  for (int number = 0; number < sm90::kNumTiles; ++number) {
    for (int mates : {1, 2}) {
      for (int split_k = 1; split_k <= sm90::kMaxParts; ++split_k) {
        Choice other;
        other.kernel = Kernel::kQmmSm90;
        other.block_m = sm90::kTiles[number].tokens;
        other.split_k = split_k;
        other.tile = number;
        other.mates = mates;
        // Nor are more parts.
        if (!UnsupportedSm90(other, problem, device, workspace_bytes).empty()) break;
        const double cost = Sm90Cost(problem, device, other);
        if (choice.block_m > 0 && cost >= best) continue;
        best = cost;
        choice = other;
      }
    }
  }
  return choice;
}

std::string UnsupportedStream(const QuantizedMatmul& problem, const Device& device) {
  const int most = qmm_sm90_stream::MaxTokens(problem.bits);
  if (problem.m > most) return "it takes up to " + std::to_string(most) + " rows of lhs";
  if (problem.k % kAtom != 0) return "k must be a multiple of 64";
  const Choice choice = ConfigureStream(problem, device);
  if (choice.slices == 0) return "its stages would not fit shared memory";
  const auto plan = StreamPlan(problem, device, choice);
  if (!qmm_sm90_stream::SupportsGroupSize(plan, problem.group_size)) {
    return "groups must divide its stages or be multiples of them";
  }
  return "";
}

std::string UnsupportedSm90(const QuantizedMatmul& problem) {
  if (problem.k % 8 != 0) return "k must be a multiple of 8";
  if (problem.group_size > 0 && problem.group_size != 32 && problem.group_size % kAtom != 0) {
    return "groups must be of 32, or of multiples of 64";
  }
  constexpr int64_t kMost = int64_t{1} << 31;  // positions and tiles are 32-bit numbers
  if (problem.m >= kMost || problem.batch * CeilDiv(problem.m, 32) * problem.strips() >= kMost) {
    return "it has more than 2^31 tiles";
  }
  const auto fits = [&](const qmm_sm90::TileShape& tile) {
    return qmm_sm90::PlanOf(problem, tile).num_stages >= 2;
  };
  if (std::none_of(std::begin(qmm_sm90::kTiles), std::end(qmm_sm90::kTiles), fits)) {
    return "its stages would not fit shared memory";
  }
  return "";
}

std::string UnsupportedSm80(const Choice& choice, const QuantizedMatmul& problem,
                            int64_t workspace_bytes) {
  if (!IsOneOf(choice.block_m, {8, 16, 32, 64}) || (choice.block_m == 64 && problem.scale_sums)) {
    return "block_m is none of its tiles";
  }
  const int64_t stages = CeilDiv(problem.lhs_columns(), qmm_sm80::BlockK(problem.bits));
  if (choice.split_k < 1 || choice.split_k > std::min<int64_t>(kMaxSplitK, stages)) {
    return "split_k is beyond its stages";
  }
  if (choice.split_k > 1 && WorkspaceBytes(problem, choice.split_k) > workspace_bytes) {
    return "its partial sums do not fit the workspace";
  }
  return "";
}

std::string UnsupportedStream(const Choice& choice, const QuantizedMatmul& problem,
                              const Device& device) {
  namespace stream = qmm_sm90_stream;
  if (choice.block_m != stream::TileTokens(problem.m)) return "block_m is not its tile's for m";
  if (!IsOneOf(choice.split_k, {1, 2, 4})) return "its clusters have 1, 2 or 4 CTAs";
  const int64_t most =
      std::min<int64_t>(stream::kMaxClusterSlices, problem.strips() * stream::kSlicesPerStrip);
  if (problem.epilogue.gated && choice.slices % stream::kPairSlices != 0) {
    return "slices are of pairs of strips";
  }
  if (choice.slices < 1 || choice.slices > most) return "slices is beyond those of a cluster";
  const stream::Plan plan = StreamPlan(problem, device, choice);
  if (plan.num_stages < 2) return "its stages would not fit shared memory";
  if (!stream::SupportsGroupSize(plan, problem.group_size)) {
    return "groups must divide its stages or be multiples of them";
  }
  return "";
}

}  // namespace

// CTAs that have a multiprocessor each must not meet on one, which they would if they started while
// an earlier kernel still filled others: they take more than half of its shared memory.
int StreamCtasPerSm(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  const bool alone = StreamClusters(problem, choice.slices) <= device.clusters[1][choice.split_k];
  return alone ? 1 : qmm_sm90_stream::kMaxCtasPerSm;
}

bool MayJoin(const Operands& a, const Operands& b) {
  const auto is_plain = [](const Operands& product) {
    const QuantizedMatmul& p = product.problem;
    const Buffers& b = product.buffers;
    return !p.transposed && p.orders == 0 && !p.epilogue.gated &&
           p.epilogue.activation == Activation::kNone && b.bias == nullptr &&
           b.residual == nullptr && IsAligned(b.lhs) && IsAligned(b.packed) && IsAligned(b.scale) &&
           IsAligned(b.zero);
  };
  const auto form = [](const QuantizedMatmul& p) {
    return std::tie(p.batch, p.m, p.k, p.bits, p.group_size, p.lhs, p.scale, p.out, p.zero,
                    p.scale_sums, p.half_sums);
  };
  return is_plain(a) && is_plain(b) && a.buffers.lhs == b.buffers.lhs &&
         form(a.problem) == form(b.problem);
}

QuantizedMatmul Join(const Operands* products, size_t count) {
  QuantizedMatmul joined = products[0].problem;
  for (size_t i = 1; i < count; ++i) {
    joined.n = (joined.n_blocks() + products[i].problem.n_blocks()) * kAtom;
  }
  return joined;
}

// In terms of the smallest tiles of all kernels.
LaunchLimits LimitsOf(const QuantizedMatmul& problem) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostGridY = 65535;
  const int64_t tiles_n = std::max(problem.strips(), problem.k_blocks());
  const int64_t rows = std::max<int64_t>(kMost / tiles_n, 1) * qmm_sm80::kMinBlockM;
  const int64_t tiles = CeilDiv(std::min(problem.m, rows), qmm_sm80::kMinBlockM) * tiles_n;
  return {std::clamp<int64_t>(kMost / std::max(tiles, problem.m), 1, kMostGridY),
          std::min(rows, kMost)};
}

bool Gathers(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  return choice.kernel == Kernel::kQmmSm90Stream && StreamPlan(problem, device, choice).gathers;
}

std::string Unsupported(const QuantizedMatmul& problem, const Device& device) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  if (device.compute_capability < 80) {
    return "the kernels need compute capability 8.0, this device has " +
           number(device.compute_capability / 10) + "." + number(device.compute_capability % 10);
  }
  if (problem.bits != 4 && problem.bits != 8) {
    return "the kernels read 4 or 8 bits, the weight has " + number(problem.bits);
  }
  if (problem.lhs == ElementType::kF32) return "the kernels take bfloat16 or float16 lhs";
  if (problem.scale != ElementType::kF32 && problem.scale != problem.lhs) {
    return "the kernels take scales of the dtype of lhs or float32";
  }
  if (problem.scale_sums &&
      (problem.lhs != ElementType::kBf16 || problem.scale != ElementType::kF32 ||
       problem.zero == ZeroKind::kFloat || problem.transposed)) {
    return "scales multiply sums only with bfloat16 lhs, float32 scales and no float zero, not "
           "transposed";
  }
  const Epilogue& e = problem.epilogue;
  if (problem.transposed && (e.gated || e.activation != Activation::kNone)) {
    return "the transposed product has no epilogue";
  }
  for (ElementType type : {e.bias, e.residual}) {
    if (type != ElementType::kF32 && type != problem.lhs) {
      return "the kernels add a bias and a residual of the dtype of lhs or float32";
    }
  }
  if (problem.out != ElementType::kF32 && problem.out != problem.lhs) {
    return "the kernels write the dtype of lhs or float32";
  }
  constexpr int64_t kLargest = int64_t{1} << 30;  // 32-bit positions along k, and atoms along n
  if (problem.k > kLargest || problem.n > kLargest) {
    return "k=" + number(problem.k) + " or n=" + number(problem.n) + " is beyond 2^30";
  }
  return "";
}

std::string Unsupported(Kernel kernel, const QuantizedMatmul& problem, const Device& device) {
  std::string reason = Unsupported(problem, device);
  if (!reason.empty() || kernel == Kernel::kQmmSm80) return reason;
  if (device.compute_capability != 90) return "it needs compute capability 9.0";
  if (problem.transposed) return "it has no transposed product";
  if (problem.scale_sums) return "its scales multiply weights, not sums";
  if (problem.k > 1 << 21) return "k is beyond 2^21";
  // A permuted lhs is gathered to where it is aligned.
  if (!problem.weights_aligned || (!problem.lhs_aligned && problem.orders == 0)) {
    return "it copies from multiples of 16 bytes";
  }
  return kernel == Kernel::kQmmSm90 ? UnsupportedSm90(problem) : UnsupportedStream(problem, device);
}

std::string Unsupported(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                        int64_t workspace_bytes) {
  const std::string reason = Unsupported(choice.kernel, problem, device);
  if (!reason.empty()) return reason;
  return choice.kernel == Kernel::kQmmSm90Stream ? UnsupportedStream(choice, problem, device)
         : choice.kernel == Kernel::kQmmSm90
             ? UnsupportedSm90(choice, problem, device, workspace_bytes)
             : UnsupportedSm80(choice, problem, workspace_bytes);
}

double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice) {
  switch (choice.kernel) {
    // Of these two, fits rank choices; against other kernels they are corrected as measured
    // (docs/kernels/qmm_sm90.md).
    case Kernel::kQmmSm80: {
      struct Correction {
        double factor, once;
      };
      const bool wide = problem.bits == 8;
      const Correction correction = choice.block_m == 8    ? Correction{wide ? 0.6 : 0.64, 1.9}
                                    : choice.block_m == 16 ? Correction{wide ? 0.61 : 0.8, 1.8}
                                                           : Correction{wide ? 0.56 : 0.86, 2.2};
      return correction.factor * Sm80Cost(problem, device, choice.block_m, choice.split_k) +
             correction.once;
    }
    case Kernel::kQmmSm90Stream:
      return StreamCost(problem, device, choice);
    case Kernel::kQmmSm90:
      return Sm90Cost(problem, device, choice);
  }
  return 0;
}

Choice Configure(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes) {
  return kernel == Kernel::kQmmSm90Stream ? ConfigureStream(problem, device)
         : kernel == Kernel::kQmmSm90     ? ConfigureSm90(problem, device, workspace_bytes)
                                          : ConfigureSm80(problem, device, workspace_bytes);
}

Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
              const TunedTable* tuned) {
  if (tuned != nullptr) {
    const std::optional<Choice> found = tuned->Find(problem);
    if (found && Unsupported(*found, problem, device, workspace_bytes).empty()) return *found;
  }
  Choice best;
  double least = std::numeric_limits<double>::infinity();
  for (Kernel kernel : {Kernel::kQmmSm90Stream, Kernel::kQmmSm90, Kernel::kQmmSm80}) {
    if (!Unsupported(kernel, problem, device).empty()) continue;
    const Choice choice = Configure(kernel, problem, device, workspace_bytes);
    const double cost = Cost(problem, device, choice);
    if (cost >= least) continue;
    least = cost;
    best = choice;
  }
  return best;
}

void AssumeClusters(Device& device) {
  for (int ctas_per_sm : {1, 2}) {
    for (int ctas : {1, 2, 4}) {
      // Larger clusters do not fill groups of multiprocessors (H200: 30 of 33).
      device.clusters[ctas_per_sm][ctas] =
          ctas_per_sm * device.num_sms / ctas * (ctas == 4 ? 15 : 16) / 16;
    }
  }
}

}  // namespace jaxlowbit
