// SPDX-License-Identifier: Apache-2.0
//
// `driver` checks and times the kernels without JAX.
//
//   driver check [STRIDE [BITS [CODEBOOK [LHS]]]]
//                           checks every instance on small awkward shapes, also under PDL and with
//                           overlapping or unaligned buffers, and large batches. STRIDE: checks every
//                           STRIDE-th problem only, for compute-sanitizer's slower tools; use a prime
//                           from 7 on, since kinds of problems repeat every 2 to 8. BITS, CODEBOOK
//                           (none, table, e2m1, e4m3, e5m2), LHS (int8, e4m3): only these
//   driver placed           times products with overlapping or unaligned buffers
//   driver attend [STRIDE]  checks and times attention; with STRIDE, only checks every STRIDE-th case
//   driver experts [STRIDE] the same for the kernels around products of experts
//   driver exchange [GPUS]  checks and times the addition of rows over 2 up to all GPUs, and over several devices that
//                           are all GPU 0; with GPUS, only checks, over up to GPUS
//   driver sweep            checks real layer shapes with every m of the sweep
//   driver time [options]   checks a sample of the result, then prints microseconds per call with cold
//                           weights, in a CUDA graph:
//                           --n N,N,... --k K,K,... (in pairs; default: five real shapes)
//                           --m M,M,... --bits B --group G --zero --float-zero --transposed
//                           --codebook table|e2m1|e4m3|e5m2 --scale float32|e8m0|e4m3|int8
//                           --lhs int8|e4m3 (quantized activations) --integers (int32 sums of int8)
//                           --scale-accumulators --f16 --accumulate-float16
//                           --pdl (all but the first launch use programmatic dependent launch);
//                           --quick (half of the weights, and a third of the replays);
//                           --permuted (rows of the weight in a permuted order);
//                           --units (outer float scales of e4m3 and int8 scales)
//                           --bias --residual --activation silu|gelu|gelu_tanh|relu --gated (n of each
//                           of two weights);
//                           --kernel qmm_sm80|qmm_sm90_stream|qmm_sm90,
//                           --tile T,T,..., --split S,S,..., --slices L,L,... and --peers 1|2 override
//                           the selection (tile: rows, or for qmm_sm90 the index of a tile shape)
//   driver choices [options]  times the choices of every kernel and prints JSON lines for
//                           tools/fit_costs.py; problem options as for `driver time`. Default: layers
//                           of real models, all row counts, 4 and 8 bits, small m also under PDL.
//                           --seconds S: starts no problem after S seconds
//   driver ragged [options] checks and times the choices of ragged products, of experts of real models, by sizes of
//                           groups and by a list; marks the selected and the fastest choice:
//                           --models M,M,... --tokens T,T,... --all (also choices of more than twice the least
//                           cost) --pdl --json (lines as of `driver choices`, with costs) --seconds S: starts
//                           nothing after S seconds
//
// On a wrong result, prints the problem and the ratio of error to bound, and exits with status 1.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/check/check_sending.h"
#include "cuda/check/correct.h"
#include "cuda/check/device_problem.h"
#include "cuda/check/placed_problem.h"
#include "cuda/check/time_attend.h"
#include "cuda/check/time_choices.h"
#include "cuda/check/time_exchange.h"
#include "cuda/check/time_experts.h"
#include "cuda/check/time_ragged.h"
#include "cuda/jit/compiler.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/sm90/plan.h"
#include "cuda/launch.h"
#include "cuda/ops/exchange.h"
#include "cuda/select/select.h"
#include "cuda/timing.h"

namespace jaxlowbit::check {
namespace {

constexpr int64_t kL2Bytes = int64_t{60} << 20;           // H200, the largest in use
const std::vector<std::pair<int64_t, int64_t>> kLayers = {// (n, k) of 8B to 70B models
                                                          {4096, 4096},
                                                          {14336, 4096},
                                                          {8192, 8192},
                                                          {28672, 8192},
                                                          {8192, 28672}};
// The number of elements of a result to check; a sample exceeds the channels of any layer.
constexpr int64_t kAll = INT64_MAX, kSample = int64_t{1} << 16;
const std::vector<int64_t> kRows = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

// Choices of every kernel that supports the problem: the cost model's choice, one of all choices in turn, and for
// qmm_sm90_stream one whose clusters own parts of strips.
std::vector<Choice> Choices(const QuantizedMatmul& problem, uint64_t turn) {
  std::vector<Choice> choices;
  for (int number = 0; number < kNumKernels; ++number) {
    const auto kernel = static_cast<Kernel>(number);
    if (!Supports(kernel, problem, DeviceInfo(0))) continue;
    choices.push_back(Configure(kernel, problem, DeviceInfo(0), kMaxWorkspaceBytes));
    if (kernel == Kernel::kQmmSm90Stream && problem.n > 256) {
      Choice choice = choices.back();
      choice.slices = problem.epilogue.gated ? 24 : 18;
      if (Supports(choice, problem, DeviceInfo(0), kMaxWorkspaceBytes)) choices.push_back(choice);
    }
    const std::vector<Choice> all = AllChoices(kernel, problem, DeviceInfo(0), kMaxWorkspaceBytes);
    if (!all.empty()) choices.push_back(all[turn % all.size()]);
  }
  return choices;
}

// Whether the result is within the bound. Prints failures.
bool IsWithin(const std::string& how, const QuantizedMatmul& problem, const DeviceProblem& data) {
  Check(cudaDeviceSynchronize(), "kernel");
  const double ratio = data.ErrorOverBound(0, kAll);
  if (ratio <= 1) return true;
  std::printf("WRONG  %s %s: error over bound %.3g\n", how.c_str(),
              Describe(problem, data.optional()).c_str(), ratio);
  return false;
}

// Whether the result is correct with overlapping or unaligned buffers, as XLA may pass them.
bool IsCorrectPlaced(const QuantizedMatmul& problem, const DeviceProblem& data, int turn) {
  const PlacedProblem placed(problem, data.buffers(0), Places::Of(turn));
  data.Poison();
  placed.Restore();
  Check(LaunchProduct({problem, placed.buffers()}, data.workspace_bytes(), 0, nullptr),
        "LaunchProduct");
  placed.CopyResult();
  return IsWithin("placed " + std::to_string(turn), problem, data);
}

// Whether the result is correct under PDL while the previous kernel is still writing lhs.
bool IsCorrectWithPdl(QuantizedMatmul problem, const DeviceProblem& data, const Choice& choice) {
  const Buffers original = data.buffers(0);
  const Extent lhs = LhsExtent(problem, original);
  const DeviceBuffer late(lhs.bytes);
  Check(cudaMemset(late.data(), 0xff, late.bytes()), "cudaMemset");
  data.Poison();
  Buffers buffers = original;
  buffers.lhs = late.data();
  problem.pdl = true;
  DelayedCopy(lhs, late.data());
  Check(LaunchChoice(problem, buffers, choice, 0, nullptr), "LaunchChoice");
  return IsWithin(std::string("pdl ") + NameOf(choice.kernel), problem, data);
}

struct Tally {
  int correct = 0, wrong = 0;
  void Add(bool ok) { ++(ok ? correct : wrong); }
};

// Filters of `driver check`.
struct Formats {
  std::vector<int> widths;
  std::vector<Codebook> codebooks;
  std::optional<ElementType> lhs;  // none: every type
};

template <typename F>
void ForEachType(const Formats& formats, F visit) {
  for (int bits : formats.widths) {
    const auto is_checked = [&](const InstanceKey& format) {
      const auto& checked = formats.codebooks;
      return std::find(checked.begin(), checked.end(), format.codebook) != checked.end() &&
             format.lhs == formats.lhs.value_or(format.lhs);
    };
    ForEachFormat(Family::kSm80, bits, [&](const InstanceKey& format) {
      if (!is_checked(format)) return;
      for (bool transposed : {false, true}) {
        QuantizedMatmul problem;
        problem.lhs = problem.out = format.lhs;
        problem.scale = format.scale;
        problem.bits = bits;
        problem.codebook = format.codebook;
        problem.zero = format.zero;
        problem.transposed = transposed;
        visit(problem);
        problem.scale_accumulators = true;
        if (Supports(problem, DeviceInfo(0))) visit(problem);
        problem.scale_accumulators = false;
        problem.accumulate_float16 = true;
        if (format.lhs == ElementType::kF16 && !transposed) visit(problem);
      }
    });
    ForEachByteFormat(bits, [&](const InstanceKey& format) {
      if (!is_checked(format)) return;
      QuantizedMatmul problem;
      problem.lhs = format.lhs;
      problem.scale = format.scale;
      problem.bits = bits;
      problem.zero = format.zero;
      problem.codebook = format.codebook;
      visit(problem);
    });
  }
}

// A problem and the choices to check it with.
struct Case {
  QuantizedMatmul problem;
  Optional optional;
  uint64_t seed;
  int placed;  // selects the placement of its buffers
  bool with_pdl;
  std::vector<Choice> choices;
};

// Every `stride`-th of the problems that together run all instances.
std::vector<Case> CasesOf(const Formats& formats, uint64_t stride) {
  std::vector<Case> cases;
  uint64_t seed = 1, turn = 0;
  int placed = 0;
  ForEachType(formats, [&](QuantizedMatmul problem) {
    for (int64_t m : {1, 7, 9, 16, 17, 33, 64, 129, 300}) {
      // Odd and edge sizes: unaligned rows, one element, a k that ends inside a group and a stage.
      const std::pair<int64_t, int64_t> shapes[] = {{1, 1},     {129, 100}, {64, 72},
                                                    {70, 1000}, {320, 520}, {256, 2048}};
      for (auto [n, k] : shapes) {
        const int64_t sizes[] = {16, 32, 48, 64, 96, 128, 256, -1};
        problem.group_size = sizes[seed % 8];
        problem.m = m, problem.n = n, problem.k = k;
        if (Is8Bit(problem.lhs)) {  // fewer sizes are supported for an 8-bit lhs
          const int64_t taken[] = {64, 128, 256, -1};
          problem.group_size = taken[seed % 4];
          problem.k = CeilDiv(k, 16) * 16;
        }
        problem.out = seed % 3 == 0 ? ElementType::kF32 : problem.floats();
        const bool single_accumulator =
            problem.group_size == -1 || problem.scale == ElementType::kInt8;
        if (problem.lhs == ElementType::kInt8 && single_accumulator && seed % 3 == 1) {
          problem.out = ElementType::kInt32;
        }
        problem.batch = seed % 5 == 0 ? 3 : 1;
        problem.num_weights = problem.batch;
        Optional optional;
        optional.index = seed % 10 == 0;
        if (optional.index) problem.num_weights = 2;
        problem.permuted_parts = problem.transposed || Is8Bit(problem.lhs) || seed % 7 > 2 ? 0
                                 : k % 2 == 0 ? seed % 7
                                              : seed % 7 % 2;
        problem.epilogue = {};
        if (Is8Bit(problem.lhs) || seed % 4 < 2) problem.epilogue.units = UnitsOf(problem);
        if (++seed % stride != 0) continue;
        cases.push_back(
            {problem, optional, seed, placed++, !problem.transposed, Choices(problem, seed)});
        if (problem.transposed || problem.is_integer_matmul()) continue;
        // Epilogues in all combinations of their parts.
        // All but the last, kGptOss, which is for ragged products.
        constexpr size_t kDense = static_cast<size_t>(Activation::kGptOss);
        problem.epilogue.activation = static_cast<Activation>(turn % kDense);
        // The product of two integer sums exceeds the range of float16.
        const bool leaves = problem.scale == ElementType::kInt8 && problem.lhs == ElementType::kF16;
        problem.epilogue.gated = turn % 2 != 0 && !leaves;
        if (!optional.index) problem.num_weights = problem.batch * problem.weights_per_element();
        optional.bias = turn % 3 != 0;
        optional.residual = turn % 7 < 4;
        problem.epilogue.bias = turn % 4 < 2 ? problem.floats() : ElementType::kF32;
        problem.epilogue.residual = turn % 11 < 6 ? problem.floats() : ElementType::kF32;
        ++turn;
        cases.push_back({problem, optional, seed, placed++, false, Choices(problem, turn)});
      }
    }
  });
  return cases;
}

// Starts compiling instances that the cases launch and the binary lacks, on all cores.
void StartCompilingAll(const std::vector<Case>& cases) {
  const Device& device = DeviceInfo(0);
  for (const Case& one : cases) {
    StartCompiling([&](const Target& target) {
      Ways typical(nullptr);
      std::vector<PlannedStep> plan;
      PlanProducts({{one.problem, {}}}, target, {{}, kMaxWorkspaceBytes}, &typical, &plan);
      return plan;
    });
    for (const Choice& choice : one.choices) {
      StartCompiling(KeyOf(one.problem, choice, device), device.architecture);
      QuantizedMatmul problem = one.problem;
      problem.pdl = true;
      if (one.with_pdl) StartCompiling(KeyOf(problem, choice, device), device.architecture);
    }
  }
}

Tally CheckInstances(const Formats& formats, uint64_t stride) {
  const std::vector<Case> cases = CasesOf(formats, stride);
  StartCompilingAll(cases);
  Tally tally;
  for (const Case& one : cases) {
    const DeviceProblem data(one.problem, one.optional, 1, one.seed);
    for (const Choice& choice : one.choices) {
      tally.Add(IsCorrect(one.problem, data, choice, kAll));
      if (one.with_pdl) tally.Add(IsCorrectWithPdl(one.problem, data, choice));
    }
    // No kernel supports unaligned 8-bit lhs.
    if (!Is8Bit(one.problem.lhs)) tally.Add(IsCorrectPlaced(one.problem, data, one.placed));
  }
  return tally;
}

// Checks batches of more elements than a grid has rows, with every way to assign weights.
Tally CheckBatches(uint64_t stride) {
  Tally tally;
  for (uint64_t turn = 0; turn < 12; ++turn) {
    if ((turn + 1) % stride != 0 && stride < 12) continue;
    QuantizedMatmul problem;
    problem.batch = 66000;
    problem.m = turn % 2 == 0 ? 1 : 5;
    problem.n = 72, problem.k = turn % 3 == 0 ? 64 : 40;
    problem.group_size = turn % 4 == 0 ? 16 : -1;
    problem.epilogue.gated = turn % 4 == 1;
    Optional optional;
    optional.index = turn % 3 != 0;
    optional.bias = optional.residual = turn % 5 == 0;
    problem.num_weights = optional.index  ? 7
                          : turn % 2 == 0 ? problem.batch * problem.weights_per_element()
                                          : 1;
    const DeviceProblem data(problem, optional, 1, turn);
    tally.Add(IsCorrectPlaced(problem, data, 2 * kOut));  // aligned, and out over nothing
    if (stride >= 12) break;
  }
  return tally;
}

Tally Sweep() {
  Tally tally;
  uint64_t seed = 1;
  const Formats built = {
      {std::begin(kKernelBits), std::end(kKernelBits)}, {Codebook::kNone}, std::nullopt};
  ForEachType(built, [&](QuantizedMatmul problem) {
    if (Is8Bit(problem.scale)) return;
    for (auto [n, k] : kLayers) {
      for (int64_t m : {1, 16, 32, 64, 200}) {
        problem.m = m, problem.n = n, problem.k = k;
        problem.group_size = problem.bits == 4 ? 128 : -1;
        const DeviceProblem data(problem, {}, 1, seed);
        for (const Choice& choice : Choices(problem, seed)) {
          tally.Add(IsCorrect(problem, data, choice, kAll));
        }
        ++seed;
      }
    }
  });
  return tally;
}

// Median microseconds per call by each choice, in a captured chain that rotates over `copies` weights.
std::vector<float> Time(const QuantizedMatmul& problem, const DeviceProblem& data, int copies,
                        const std::vector<Choice>& choices, const TimingEffort& effort) {
  std::vector<Buffers> calls;
  for (int i = 0; i < std::max(16, copies); ++i) calls.push_back(data.buffers(i % copies));
  std::vector<float> microseconds;
  Check(TimeChoices(problem, calls, choices, 0, &microseconds, effort), "TimeChoices");
  return microseconds;
}

[[noreturn]] void Usage(const char* wrong) {
  std::fprintf(
      stderr,
      "driver: %s. Use: driver check [STRIDE [BITS [CODEBOOK [LHS]]]] | sweep | placed | attend "
      "[STRIDE] | experts [STRIDE] | "
      "ragged [--models M,...] [--tokens T,...] [--all] [--pdl] [--json] [--seconds S] | "
      "time | choices "
      "[--n N,... --k K,...] [--m M,M,...] [--bits B] [--group G] [--zero] [--float-zero] "
      "[--codebook C] [--scale S] [--lhs int8|e4m3] [--integers] "
      "[--transposed] [--scale-accumulators] [--f16] [--accumulate-float16] [--pdl] [--permuted] "
      "[--bias] "
      "[--units] [--residual] [--activation silu|gelu|gelu_tanh|relu] [--gated] [--quick] [--tile "
      "T,...] "
      "[--split S,...] [--slices L,...] [--peers 1|2] "
      "[--kernel qmm_sm80|qmm_sm90_stream|qmm_sm90] [--seconds S]\n",
      wrong);
  std::exit(2);
}

struct TimeOptions {
  std::vector<std::pair<int64_t, int64_t>> layers;  // empty: the command's default
  std::vector<int64_t> rows;                        // empty: the command's default
  QuantizedMatmul problem;
  bool names_problem = false;  // an option specifies the problem
  Optional optional;
  bool has_units = false;  // if the weight format supports units
  double seconds = std::numeric_limits<double>::infinity();
  TimingEffort effort;
  int l2_sizes = 8;  // total size of a problem's weights, in L2 sizes
  std::optional<Kernel> kernel;
  // 0 (for tiles -1): as the selection chooses.
  std::vector<int64_t> tiles = {-1}, splits = {0}, slices = {0};
  int peers = 0;
};

// The selection's choice, with each combination of the values that the options give.
std::vector<Choice> Choices(const QuantizedMatmul& problem, const TimeOptions& options) {
  Choice selected = Select(problem, DeviceInfo(0), kMaxWorkspaceBytes);
  if (options.kernel) {
    if (!Supports(*options.kernel, problem, DeviceInfo(0))) return {};
    selected = Configure(*options.kernel, problem, DeviceInfo(0), kMaxWorkspaceBytes);
  }
  std::vector<Choice> choices;
  for (int64_t tile : options.tiles) {
    for (int64_t split : options.splits) {
      for (int64_t slices : options.slices) {
        Choice choice = selected;
        if (tile >= 0 && choice.kernel == Kernel::kQmmSm90) {
          choice.tile = static_cast<int>(std::min<int64_t>(tile, sm90::kNumTiles - 1));
          choice.block_m = sm90::kTiles[choice.tile].m;
        } else if (tile >= 0) {
          choice.block_m = static_cast<int>(tile);
        }
        if (split > 0) choice.split_k = static_cast<int>(split);
        if (slices > 0) choice.slices = static_cast<int>(slices);
        if (options.peers > 0) choice.peers = options.peers;
        if (Supports(choice, problem, DeviceInfo(0), kMaxWorkspaceBytes)) {
          choices.push_back(choice);
        }
      }
    }
  }
  return choices;
}

// The problems of the options: every layer with every row count. Small m comes first, since products with large m heat
// the device, and clocks recover slowly.
std::vector<QuantizedMatmul> ProblemsOf(
    const TimeOptions& options, const std::vector<std::pair<int64_t, int64_t>>& default_layers,
    const std::vector<int64_t>& default_rows) {
  std::vector<QuantizedMatmul> problems;
  for (int64_t m : options.rows.empty() ? default_rows : options.rows) {
    for (auto [n, k] : options.layers.empty() ? default_layers : options.layers) {
      QuantizedMatmul problem = options.problem;
      problem.m = m, problem.n = n, problem.k = k;
      problem.num_weights = problem.weights_per_element();
      if (Is8Bit(problem.lhs) || options.has_units) problem.epilogue.units = UnitsOf(problem);
      problem.epilogue.bias = problem.epilogue.residual = problem.floats();
      if (const Support support = Supports(problem, DeviceInfo(0)); !support) {
        std::fprintf(stderr, "driver: %s: %s\n", Describe(problem, options.optional).c_str(),
                     support.reason.c_str());
        std::exit(2);
      }
      problems.push_back(problem);
    }
  }
  return problems;
}

void TimeAll(const TimeOptions& options) {
  for (const QuantizedMatmul& problem : ProblemsOf(options, kLayers, kRows)) {
    const int64_t bytes = WeightBytes(problem);
    const int copies = static_cast<int>(CeilDiv(options.l2_sizes * kL2Bytes, bytes));
    const DeviceProblem data(problem, options.optional, copies, 1);
    const std::vector<Choice> choices = Choices(problem, options);
    if (choices.empty()) continue;
    for (const Choice& choice : choices) {
      if (!IsCorrect(problem, data, choice, kSample)) std::exit(1);
    }
    const std::vector<float> microseconds = Time(problem, data, copies, choices, options.effort);
    for (size_t i = 0; i < choices.size(); ++i) {
      const Choice& choice = choices[i];
      const double us = microseconds[i];
      std::printf(
          "%s  %-15s tile %-2d peers %d block_m %-3d split_k %-2d slices %-3d %8.2f us  %5.2f "
          "TB/s  %6.1f TFLOP/s\n",
          Describe(problem, options.optional).c_str(), NameOf(choice.kernel), choice.tile,
          choice.peers, choice.block_m, choice.split_k, choice.slices, us,
          1e-6 * static_cast<double>(bytes) / us,
          2e-6 * static_cast<double>(problem.num_weights * problem.m * problem.n * problem.k) / us);
    }
    std::fflush(stdout);
  }
}

// The problems of the sweep for the cost models.
std::vector<QuantizedMatmul> SweptProblems(const TimeOptions& options) {
  if (!options.names_problem) return StandardProblems();
  return ProblemsOf(options, SweepLayers(), SweepRows());
}

std::vector<int64_t> Numbers(const char* text) {
  std::vector<int64_t> numbers;
  for (const char* at = text; at != nullptr; at = std::strchr(at, ',')) {
    if (*at == ',') ++at;
    numbers.push_back(std::atoll(at));
  }
  return numbers;
}

Activation FindActivation(const std::string& name) {
  const auto found = std::find(std::begin(kActivationNames), std::end(kActivationNames), name);
  if (found == std::end(kActivationNames)) Usage("unknown activation");
  return static_cast<Activation>(found - std::begin(kActivationNames));
}

Codebook FindCodebook(const std::string& name) {
  const auto found = std::find(std::begin(kCodebookNames), std::end(kCodebookNames), name);
  if (found == std::end(kCodebookNames)) Usage("unknown codebook");
  return static_cast<Codebook>(found - std::begin(kCodebookNames));
}

ElementType FindScale(const std::string& name) {
  if (name == "float32") return ElementType::kF32;
  if (name == "e8m0") return ElementType::kE8m0;
  if (name == "e4m3") return ElementType::kE4m3;
  if (name == "int8") return ElementType::kInt8;
  Usage("unknown type of scales");
}

ElementType FindLhs(const std::string& name) {
  if (name == "int8") return ElementType::kInt8;
  if (name == "e4m3") return ElementType::kE4m3;
  Usage("unknown type of lhs");
}

Kernel FindKernel(const std::string& name) {
  const auto found = std::find(std::begin(kKernelNames), std::end(kKernelNames), name);
  if (found == std::end(kKernelNames)) Usage("unknown kernel");
  return static_cast<Kernel>(found - std::begin(kKernelNames));
}

TimeOptions Parse(int argc, char** argv) {
  TimeOptions options;
  options.problem.group_size = 128;
  std::vector<int64_t> n, k;
  for (int i = 2; i < argc; ++i) {
    const std::string flag = argv[i];
    options.names_problem |= flag != "--seconds";
    if (flag == "--zero") {
      options.problem.zero = ZeroKind::kInteger;
    } else if (flag == "--scale-accumulators") {
      options.problem.scale_accumulators = true;
      options.problem.scale = options.problem.out = ElementType::kF32;
    } else if (flag == "--integers") {
      options.problem.out = ElementType::kInt32;
    } else if (flag == "--transposed") {
      options.problem.transposed = true;
    } else if (flag == "--float-zero") {
      options.problem.zero = ZeroKind::kFloat;
    } else if (flag == "--f16") {
      options.problem.lhs = options.problem.scale = options.problem.out = ElementType::kF16;
    } else if (flag == "--accumulate-float16") {
      options.problem.accumulate_float16 = true;
      options.problem.lhs = options.problem.scale = options.problem.out = ElementType::kF16;
    } else if (flag == "--pdl") {
      options.problem.pdl = true;
    } else if (flag == "--permuted") {
      options.problem.permuted_parts = 1;
    } else if (flag == "--bias") {
      options.optional.bias = true;
    } else if (flag == "--units") {
      options.has_units = true;
    } else if (flag == "--residual") {
      options.optional.residual = true;
    } else if (flag == "--gated") {
      options.problem.epilogue.gated = true;
    } else if (flag == "--quick") {
      options.effort = {.warm_up_milliseconds = 6, .min_replays = 7, .replays = 7};
      options.l2_sizes = 4;
    } else if (i + 1 == argc) {
      Usage(("unknown or incomplete option " + flag).c_str());
    } else if (flag == "--kernel") {
      options.kernel = FindKernel(argv[++i]);
    } else if (flag == "--codebook") {
      options.problem.codebook = FindCodebook(argv[++i]);
    } else if (flag == "--scale") {
      options.problem.scale = FindScale(argv[++i]);
    } else if (flag == "--lhs") {
      options.problem.lhs = FindLhs(argv[++i]);
    } else if (flag == "--seconds") {
      options.seconds = std::atof(argv[++i]);
    } else if (flag == "--activation") {
      options.problem.epilogue.activation = FindActivation(argv[++i]);
    } else if (const std::vector<int64_t> values = Numbers(argv[++i]); flag == "--m") {
      options.rows = values;
    } else if (flag == "--n") {
      n = values;
    } else if (flag == "--k") {
      k = values;
    } else if (flag == "--bits") {
      options.problem.bits = static_cast<int>(values[0]);
    } else if (flag == "--tile") {
      options.tiles = values;
    } else if (flag == "--slices") {
      options.slices = values;
    } else if (flag == "--peers") {
      options.peers = static_cast<int>(values[0]);
    } else if (flag == "--split") {
      options.splits = values;
    } else if (flag == "--group") {
      options.problem.group_size = values[0];
    } else {
      Usage(("unknown option " + flag).c_str());
    }
  }
  if (n.size() != k.size()) Usage("--n and --k go together, one k for each n");
  for (size_t i = 0; i < n.size(); ++i) options.layers.emplace_back(n[i], k[i]);
  return options;
}

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a stopped check has printed lines
  const std::string command = argc > 1 ? argv[1] : "";
  const char* const commands[] = {"check",  "sweep",   "time",     "choices", "placed",
                                  "attend", "experts", "exchange", "ragged"};
  if (std::find(std::begin(commands), std::end(commands), command) == std::end(commands)) {
    Usage("no command");
  }
  Check(PrepareKernels(0), "PrepareKernels");
  if (command == "placed") {
    TimePlaced();
    return 0;
  }
  if (command == "attend" || command == "experts") {
    const bool attends = command == "attend";
    const auto check = attends ? CheckAttend : CheckExperts;
    const auto [correct, wrong] = check(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    std::printf("%d passed, %d failed\n", correct, wrong);
    if (argc == 2) (attends ? TimeAttend : TimeExperts)();
    return wrong == 0 ? 0 : 1;
  }
  if (command == "exchange") {
    const int most = argc > 2 ? std::atoi(argv[2]) : kMaxExchangeParts;
    auto [correct, wrong] = CheckExchange(most);
    const auto [sent, not_sent] = CheckSending(most);
    correct += sent, wrong += not_sent;
    std::printf("%d passed, %d failed\n", correct, wrong);
    if (wrong == 0 && argc == 2) TimeExchange(most), TimeSending();
    jit::Finish();
    return wrong == 0 ? 0 : 1;
  }
  if (command == "ragged") {
    RaggedOptions options;
    const std::string wrong = ParseRagged(argc, argv, &options);
    if (!wrong.empty()) Usage(wrong.c_str());
    const bool correct = TimeRagged(options);
    jit::Finish();
    return correct ? 0 : 1;
  }
  if (command == "time") {
    TimeAll(Parse(argc, argv));
    return 0;
  }
  if (command == "choices") {
    const TimeOptions options = Parse(argc, argv);
    TimeProblems(SweptProblems(options), options.optional, options.seconds);
    return 0;
  }
  Tally tally;
  if (command == "check") {
    const uint64_t stride = argc > 2 ? Numbers(argv[2])[0] : 1;
    Formats formats;
    auto& [widths, codebooks, lhs] = formats;
    widths.assign(std::begin(kKernelBits), std::end(kKernelBits));
    widths.insert(widths.end(), std::begin(kCompiledBits), std::end(kCompiledBits));
    if (argc > 3) widths = {static_cast<int>(Numbers(argv[3])[0])};
    for (const char* name : kCodebookNames) codebooks.push_back(FindCodebook(name));
    if (argc > 4) codebooks = {FindCodebook(argv[4])};
    if (argc > 5) lhs = FindLhs(argv[5]);
    for (const Tally& part : {CheckInstances(formats, stride), CheckBatches(stride)}) {
      tally.correct += part.correct, tally.wrong += part.wrong;
    }
  } else {
    tally = Sweep();
  }
  std::printf("%d passed, %d failed\n", tally.correct, tally.wrong);
  jit::Finish();  // instances that a stride skipped may still be compiling
  return tally.wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxlowbit::check

int main(int argc, char** argv) { return jaxlowbit::check::Main(argc, argv); }
