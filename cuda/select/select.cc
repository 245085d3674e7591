// SPDX-License-Identifier: Apache-2.0

#include "cuda/select/select.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/sm80/select.h"
#include "cuda/kernels/sm90/plan.h"
#include "cuda/kernels/sm90/select.h"
#include "cuda/kernels/sm90_stream/select.h"
#include "cuda/select/ragged.h"
#include "cuda/select/tuned.h"

namespace jaxlowbit {
namespace {

// The selection functions of one kernel.
struct KernelDecision {
  Kernel kernel;
  // Whether the kernel supports a problem that passes Supports(problem, device), and whether it supports a choice.
  Support (*supports_problem)(const QuantizedMatmul&, const Device&);
  Support (*supports_choice)(const Choice&, const QuantizedMatmul&, const Device&,
                             int64_t workspace_bytes);
  // All choices, supported or not.
  std::vector<Choice> (*choices)(const QuantizedMatmul&);
  // The cheapest choice for a supported problem.
  Choice (*configure)(const QuantizedMatmul&, const Device&, int64_t workspace_bytes);
  // Expected microseconds of a supported choice, with the given constants or else the fitted ones.
  double (*cost)(const QuantizedMatmul&, const Device&, const Choice&, const double* constants);
  // The fitted constants.
  std::vector<double> (*constants)();
};

// Adapts a kernel's cost function, whose constants are a struct of doubles, to KernelDecision.
template <auto kCost, const auto& kFitted>
double CostBy(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
              const double* constants) {
  auto costs = kFitted;
  if (constants != nullptr) std::memcpy(&costs, constants, sizeof(costs));
  return kCost(problem, device, choice, costs) / RelativeClock(device);
}

template <const auto& kFitted>
std::vector<double> Constants() {
  static_assert(sizeof(kFitted) % sizeof(double) == 0);
  std::vector<double> constants(sizeof(kFitted) / sizeof(double));
  std::memcpy(constants.data(), &kFitted, sizeof(kFitted));
  return constants;
}

// In order of preference at equal cost.
constexpr KernelDecision kKernels[] = {
    {Kernel::kQmmSm90Stream, sm90_stream::SupportsProblem, sm90_stream::SupportsChoice,
     sm90_stream::Choices, sm90_stream::Configure, CostBy<sm90_stream::Cost, sm90_stream::kCosts>,
     Constants<sm90_stream::kCosts>},
    {Kernel::kQmmSm90, sm90::SupportsProblem, sm90::SupportsChoice, sm90::Choices, sm90::Configure,
     CostBy<sm90::Cost, sm90::kCosts>, Constants<sm90::kCosts>},
    {Kernel::kQmmSm80, sm80::SupportsProblem, sm80::SupportsChoice, sm80::Choices, sm80::Configure,
     CostBy<sm80::Cost, sm80::kCosts>, Constants<sm80::kCosts>},
};
static_assert(std::size(kKernels) == kNumKernels);

template <size_t kSize>
bool Contains(const int (&values)[kSize], int value) {
  return std::find(std::begin(values), std::end(values), value) != std::end(values);
}

const KernelDecision& DecisionOf(Kernel kernel) {
  return *std::find_if(std::begin(kKernels), std::end(kKernels),
                       [&](const KernelDecision& decision) { return decision.kernel == kernel; });
}

// Requirements that all Hopper kernels share.
Support SupportsOnHopper(Kernel kernel, const QuantizedMatmul& problem, const Device& device) {
  if (device.compute_capability != 90) return {"it needs compute capability 9.0"};
  if (problem.transposed) return {"it has no transposed product"};
  if (problem.scale_accumulators) return {"its scales multiply weights, not sums"};
  if (problem.k > 1 << 21) return {"k is beyond 2^21"};
  // Gathering a permuted lhs also aligns it.
  if (!problem.weights_aligned || (!problem.lhs_aligned && problem.permuted_parts == 0)) {
    return {"it copies from multiples of 16 bytes"};
  }
  // Without a compiler, qmm_sm80 is the fallback: the build contains it for all formats of these widths.
  const Family family = kernel == Kernel::kQmmSm90 ? Family::kSm90 : Family::kSm90Stream;
  const bool other_runs = IsPrebuiltFormat(Family::kSm80, problem);
  const bool built = IsPrebuiltFormat(family, problem);
  if (other_runs && !built && !device.can_compile()) {
    return {"its instances for this format are compiled where they run, and there is no compiler"};
  }
  return {};
}

// Possible rows of a block in ragged products of qmm_sm90_stream whose CTAs are persistent.
constexpr int kStreamBlocks[] = {8, 16, 32}, kCommonBlock = 8;

// Maximum experts of a ragged product, whose table is in shared memory.
constexpr int64_t kMaxExperts = 512;

// Whether a kernel supports a ragged product. Its instances are compiled at first use.
Support SupportsRagged(const QuantizedMatmul& problem, const Device& device) {
  if (problem.batch != 1 || problem.transposed || problem.permuted_parts > 0 ||
      Is8Bit(problem.lhs) || problem.apply_lhs_scale) {
    return {"rows in groups are of 16 bits, and neither batched, transposed nor permuted"};
  }
  if (problem.experts() < 1 || problem.experts() > kMaxExperts) {
    return {"products of rows in groups have from 1 to " + std::to_string(kMaxExperts) +
            " weights, this one has " + std::to_string(problem.experts())};
  }
  if (!device.can_compile()) {
    return {"kernels for rows in groups are compiled where they run, and there is no compiler"};
  }
  const QuantizedMatmul blocks = BlocksOf(problem, kCommonBlock);
  const Support support = Supports(blocks, device);
  if (!support) return support;
  for (const KernelDecision& decision : kKernels) {
    if (Supports(decision.kernel, blocks, device)) return {};
  }
  return Supports(Kernel::kQmmSm80, blocks, device);
}

// Choices of qmm_sm90_stream with blocks of so many rows, preferred ones first: clusters whose CTAs read more, since
// each tile starts by finding its expert.
std::vector<RaggedChoice> StreamChoicesOf(const QuantizedMatmul& problem, const Device& device,
                                          int block_m) {
  const QuantizedMatmul blocks = BlocksOf(problem, block_m);
  if (!Supports(Kernel::kQmmSm90Stream, blocks, device)) return {};
  std::vector<Choice> choices = sm90_stream::Choices(blocks);
  std::stable_sort(choices.begin(), choices.end(), [](const Choice& left, const Choice& right) {
    return left.slices * right.split_k > right.slices * left.split_k;
  });
  std::vector<RaggedChoice> found;
  for (Choice& choice : choices) {
    // Persistent CTAs multiply one tile at a time, with work for all warps.
    if (block_m > 1 && sm90_stream::kMaxTileSlices % choice.slices != 0) continue;
    if (!sm90_stream::SupportsChoice(choice, blocks, device, 0)) continue;
    const double cost = Cost(blocks, device, choice);
    choice.block_m = block_m;
    found.push_back({choice, cost});
  }
  return found;
}

std::vector<RaggedChoice> ListedChoices(const QuantizedMatmul& problem, const Device& device) {
  return StreamChoicesOf(problem, device, 1);
}

// The smallest blocks first.
std::vector<RaggedChoice> RaggedStreamChoices(const QuantizedMatmul& problem,
                                              const Device& device) {
  std::vector<RaggedChoice> found;
  for (int block_m : kStreamBlocks) {
    const std::vector<RaggedChoice> choices = StreamChoicesOf(problem, device, block_m);
    found.insert(found.end(), choices.begin(), choices.end());
  }
  return found;
}

// Choices of qmm_sm90, the smallest blocks first.
std::vector<RaggedChoice> RaggedTileChoices(const QuantizedMatmul& problem, const Device& device) {
  constexpr double kTwoCtas = 1.2;  // measured: tiles with two CTAs per SM do not hide their ends
  std::vector<RaggedChoice> found;
  for (const Choice& choice : sm90::Choices(problem)) {
    if (choice.peers > 1 || choice.split_k > 1) continue;
    const QuantizedMatmul blocks = BlocksOf(problem, choice.block_m);
    if (!Supports(choice, blocks, device, 0)) continue;
    const bool two_ctas = sm90::kTiles[choice.tile].ctas_per_sm > 1;
    found.push_back({choice, Cost(blocks, device, choice) * (two_ctas ? kTwoCtas : 1)});
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& left, const auto& right) {
    return left.choice.block_m < right.choice.block_m;
  });
  return found;
}

// Choices of qmm_sm80, the smallest blocks first.
std::vector<RaggedChoice> RaggedGeneralChoices(const QuantizedMatmul& problem,
                                               const Device& device) {
  std::vector<RaggedChoice> found;
  for (const Choice& choice : sm80::Choices(problem)) {
    const QuantizedMatmul blocks = BlocksOf(problem, choice.block_m);
    if (choice.split_k > 1 || !Supports(choice, blocks, device, 0)) continue;
    found.push_back({choice, Cost(blocks, device, choice)});
  }
  return found;
}

// The cheapest choice for a ragged product, by the cost of the expected blocks. If several choices wait for memory, it
// is the first one. qmm_sm80 is the fallback on other devices and for unaligned operands.
Choice SelectRagged(const QuantizedMatmul& problem, const Device& device) {
  constexpr double kSame = 0.97;
  if (problem.listed_per_row == 0 && PrefersList({problem}, device)) {
    QuantizedMatmul rows = problem;
    rows.listed_per_row = 1;
    return SelectRagged(rows, device);
  }
  Choice best;
  double min_cost = std::numeric_limits<double>::infinity();
  const double read = ReadCost(problem, device);
  for (const auto& [choice, computed] : RaggedChoices(problem, device)) {
    const double cost = std::max(computed, read);
    if (cost >= kSame * min_cost) continue;
    min_cost = cost;
    best = choice;
  }
  return best;
}

std::string Number(int64_t value) { return std::to_string(value); }

bool IsLhsOrFloat32(ElementType type, const QuantizedMatmul& problem) {
  return type == ElementType::kF32 || type == problem.floats();
}

Support SupportsLhs(const QuantizedMatmul& problem) {
  if (problem.lhs == ElementType::kF32 || problem.lhs == ElementType::kE8m0) {
    return {"the kernels take bfloat16, float16, int8 or float8_e4m3fn lhs"};
  }
  if (Is8Bit(problem.lhs) &&
      (!Supports8BitLhs(problem.lhs, problem.bits, problem.codebook, problem.scale, problem.zero) ||
       problem.transposed || problem.permuted_parts > 0)) {
    return {
        "the kernels multiply int8 lhs by integers of 4 and 8 bits, and float8_e4m3fn by e4m3, "
        "with scales of 16 or 32 bits (4-bit integers also with int8 scales or integer zeros), and "
        "neither transposed nor permuted"};
  }
  return {};
}

Support SupportsWeights(const QuantizedMatmul& problem) {
  if (!Contains(kKernelBits, problem.bits) && !Contains(kCompiledBits, problem.bits)) {
    return {"the kernels do not read weights of " + Number(problem.bits) + " bits"};
  }
  if (!IsLhsOrFloat32(problem.scale, problem) && !Is8Bit(problem.scale)) {
    return {"the kernels take scales of the dtype of lhs, float32 or 8 bits"};
  }
  if (!HasScale(problem.bits, problem.codebook, problem.scale)) {
    return {"scales that are integers multiply integers of 2 to 4 bits"};
  }
  if (!HasCodebook(problem.bits, problem.codebook)) {
    if (problem.codebook == Codebook::kTable) {
      return {"the kernels look up numbers of codebooks of up to " + Number(kMaxTableBits) +
              " bits, the format has " + Number(problem.bits)};
    }
    return {std::string("there is no ") + kCodebookNames[static_cast<int>(problem.codebook)] +
            " of " + Number(problem.bits) + " bits"};
  }
  if (!HasZero(problem.codebook, problem.scale, problem.zero)) {
    return {
        "neither codebooks nor scales of 8 bits have zeros, and those of two levels float ones "
        "alone"};
  }
  if (problem.scale_accumulators &&
      (problem.lhs != ElementType::kBf16 || problem.scale != ElementType::kF32 ||
       problem.zero == ZeroKind::kFloat || problem.codebook != Codebook::kNone ||
       problem.transposed)) {
    return {
        "with float32 lhs the kernels take integers with scales of 16 or 32 bits, and no float "
        "zero or transposed product"};
  }
  return {};
}

Support SupportsResult(const QuantizedMatmul& problem) {
  const Epilogue& e = problem.epilogue;
  if (problem.transposed && (e.gated || e.activation != Activation::kNone)) {
    return {"the transposed product has no epilogue"};
  }
  if (problem.apply_lhs_scale && (e.gated || e.activation != Activation::kNone)) {
    return {"results whose rows are scaled have no epilogue"};
  }
  if (problem.rounding != Rounding::kNone &&
      (!problem.apply_lhs_scale || problem.lhs != ElementType::kBf16 ||
       problem.permuted_parts > 0)) {
    return {"a product rounds rows of bfloat16, which are not permuted, and scales its results"};
  }
  if (!IsLhsOrFloat32(e.bias, problem) || !IsLhsOrFloat32(e.residual, problem)) {
    return {"the kernels add a bias and a residual of the dtype of lhs or float32"};
  }
  if (problem.is_integer_matmul()) {
    if (problem.lhs != ElementType::kInt8 || e.gated || e.activation != Activation::kNone) {
      return {"sums of integers are those of int8 lhs, without an epilogue"};
    }
  } else if (!IsLhsOrFloat32(problem.out, problem)) {
    return {"the kernels write the dtype of lhs or float32"};
  }
  return {};
}

}  // namespace

Support Supports(const QuantizedMatmul& problem, const Device& device) {
  if (problem.is_ragged()) return SupportsRagged(problem, device);
  if (device.compute_capability < 80) {
    return {"the kernels need compute capability 8.0, this device has " +
            Number(device.compute_capability / 10) + "." + Number(device.compute_capability % 10)};
  }
  Support support = SupportsLhs(problem);
  if (support) support = SupportsWeights(problem);
  if (support) support = SupportsResult(problem);
  if (!support) return support;
  constexpr int64_t kLargest = int64_t{1} << 30;  // 32-bit positions along k, and atoms along n
  if (problem.k > kLargest || problem.n > kLargest) {
    return {"the kernels take k and n up to 2^30, this matrix has k=" + Number(problem.k) +
            " and n=" + Number(problem.n)};
  }
  if (!HasTwoLevels(problem.scale)) return {};
  // Only one kernel supports two-level scales, so its limits apply to all products with them.
  if (!DividesSuperBlock(problem.group_size)) {
    return {"scales of two levels are read in groups of 16, 32, 64 or 128"};
  }
  support = SupportsOnHopper(Kernel::kQmmSm90Stream, problem, device);
  return support ? sm90_stream::SupportsProblem(problem, device) : support;
}

Support Supports(Kernel kernel, const QuantizedMatmul& problem, const Device& device) {
  if (problem.is_ragged()) {
    return Supports(kernel, BlocksOf(problem, kCommonBlock), device);
  }
  Support support = Supports(problem, device);
  if (support && Is8Bit(problem.lhs) && kernel != Kernel::kQmmSm90) {
    return {"it multiplies an lhs of 16 bits"};
  }
  if (support && problem.apply_lhs_scale && kernel != Kernel::kQmmSm90Stream) {
    return {"it does not scale rows"};
  }
  if (support && HasTwoLevels(problem.scale) && kernel != Kernel::kQmmSm90Stream) {
    return {"it reads no scales of two levels"};
  }
  if (support && kernel != Kernel::kQmmSm80) support = SupportsOnHopper(kernel, problem, device);
  return support ? DecisionOf(kernel).supports_problem(problem, device) : support;
}

Support Supports(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes) {
  const Support support = Supports(choice.kernel, problem, device);
  if (!support) return support;
  return DecisionOf(choice.kernel).supports_choice(choice, problem, device, workspace_bytes);
}

double ReadCost(const QuantizedMatmul& problem, const Device& device) {
  constexpr double kReached = 0.87;  // of the rate that the largest dense products reach
  const int all_rows = static_cast<int>(std::max<int64_t>(problem.m, 1));
  const auto kilobytes =
      static_cast<double>(ExpectedBlocks(problem, all_rows) * problem.strips() *
                          problem.k_blocks() * kAtom * kAtom * problem.bits / 8 / 1000);
  return kilobytes / (kReached * sm90_stream::kCosts.read_kilobytes * RelativeMemoryRate(device));
}

std::vector<RaggedChoice> RaggedChoices(const QuantizedMatmul& problem, const Device& device) {
  if (problem.listed_per_row > 0) return ListedChoices(problem, device);
  std::vector<RaggedChoice> choices = RaggedStreamChoices(problem, device);
  const std::vector<RaggedChoice> tiles = RaggedTileChoices(problem, device);
  choices.insert(choices.end(), tiles.begin(), tiles.end());
  return choices.empty() ? RaggedGeneralChoices(problem, device) : choices;
}

bool PrefersList(const std::vector<QuantizedMatmul>& products, const Device& device) {
  constexpr int64_t kMaxListed = 64;
  constexpr double kSaved = 6;  // microseconds that grouping the rows, or persistent CTAs, take
  double read_again = 0;
  for (QuantizedMatmul listed : products) {
    if (listed.m < 1 || listed.m > kMaxListed) return false;
    if (!Supports(Kernel::kQmmSm90Stream, listed, device)) return false;
    const double read_once = ReadCost(listed, device);
    listed.listed_per_row = 1;
    if (ListedChoices(listed, device).empty()) return false;
    read_again += ReadCost(listed, device) - read_once;
  }
  return read_again < kSaved;
}

double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice,
            const double* constants) {
  return DecisionOf(choice.kernel).cost(problem, device, choice, constants);
}

std::vector<double> CostConstants(Kernel kernel) { return DecisionOf(kernel).constants(); }

Choice Configure(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes) {
  return DecisionOf(kernel).configure(problem, device, workspace_bytes);
}

Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
              const TunedTable* tuned) {
  if (problem.is_ragged()) return SelectRagged(problem, device);
  if (tuned != nullptr) {
    const std::optional<Choice> found = tuned->Find(problem);
    if (found && Supports(*found, problem, device, workspace_bytes)) return *found;
  }
  Choice best;
  double min_cost = std::numeric_limits<double>::infinity();
  for (const KernelDecision& decision : kKernels) {
    if (!Supports(decision.kernel, problem, device)) continue;
    const Choice choice = decision.configure(problem, device, workspace_bytes);
    const double cost = decision.cost(problem, device, choice, nullptr);
    if (cost >= min_cost) continue;
    min_cost = cost;
    best = choice;
  }
  return best;
}

std::vector<Choice> AllChoices(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes) {
  const KernelDecision& decision = DecisionOf(kernel);
  if (!Supports(kernel, problem, device)) return {};
  std::vector<Choice> choices = decision.choices(problem);
  const auto is_unsupported = [&](const Choice& choice) {
    return !decision.supports_choice(choice, problem, device, workspace_bytes);
  };
  choices.erase(std::remove_if(choices.begin(), choices.end(), is_unsupported), choices.end());
  return choices;
}

std::vector<Choice> Candidates(const QuantizedMatmul& problem, const Device& device,
                               int64_t workspace_bytes) {
  constexpr size_t kMaxPerKernel = 12;
  constexpr double kMaxCostRatio = 2;  // relative to the cheapest choice
  const Choice best = Select(problem, device, workspace_bytes);
  const double max_cost = kMaxCostRatio * Cost(problem, device, best);
  std::vector<Choice> candidates = {best};
  for (const KernelDecision& decision : kKernels) {
    std::vector<std::pair<double, Choice>> choices;
    for (const Choice& choice : AllChoices(decision.kernel, problem, device, workspace_bytes)) {
      const double cost = decision.cost(problem, device, choice, nullptr);
      if (cost <= max_cost && NumbersOf(choice) != NumbersOf(best))
        choices.emplace_back(cost, choice);
    }
    std::stable_sort(choices.begin(), choices.end(),
                     [](const auto& left, const auto& right) { return left.first < right.first; });
    if (choices.size() > kMaxPerKernel) choices.resize(kMaxPerKernel);
    for (const auto& [cost, choice] : choices) candidates.push_back(choice);
  }
  return candidates;
}

void AssumeClusters(Device& device) {
  for (int ctas_per_sm : {1, 2}) {
    for (int ctas : {1, 2, 4}) {
      // Clusters of 4 do not fill every GPC (H200: 30 of 33).
      device.clusters[ctas_per_sm][ctas] =
          ctas_per_sm * device.num_sms / ctas * (ctas == 4 ? 15 : 16) / 16;
    }
  }
}

}  // namespace jaxlowbit
