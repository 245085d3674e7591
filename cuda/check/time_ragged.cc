// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/time_ragged.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <utility>

#include "cuda/check/correct.h"
#include "cuda/check/device_problem.h"
#include "cuda/check/time_choices.h"
#include "cuda/check/vectors.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/kernels/loaded.h"
#include "cuda/launch.h"
#include "cuda/select/ragged.h"
#include "cuda/select/select.h"
#include "cuda/timing.h"

namespace jaxlowbit::check {
namespace {

constexpr int64_t kColdBytes = int64_t{180} << 20;  // three times the L2 of an H200
constexpr double kMinGraphMicroseconds = 400;       // makes the launch of a graph negligible
constexpr double kMaxCostRatio = 2;                 // relative to the cheapest choice
constexpr int64_t kMaxListed = 64;                  // rows
constexpr int64_t kSample = int64_t{1} << 14;       // elements of a result to check
constexpr TimingEffort kEffort = {10, 3, 20, 250};

// The experts of a model: the first product, of gate and up, is (hidden, 2 inner), the second one (inner, hidden).
struct Model {
  const char* name;
  int experts, top;
  int64_t hidden, inner;
  bool mxfp4;  // else integers of 4 bits in groups of 128
};

constexpr Model kModels[] = {{"qwen3-30b-a3b", 128, 8, 2048, 768, false},
                             {"mixtral-8x7b", 8, 2, 4096, 14336, false},
                             {"gpt-oss-120b", 128, 4, 2880, 2880, true},
                             {"qwen3.5-35b-a3b", 256, 8, 2048, 512, false},
                             {"qwen1.5-moe-a2.7b", 60, 4, 2048, 1408, false}};

// One product of a model.
struct Case {
  const Model* model;
  bool down, listed;
  int64_t tokens;

  int64_t rows() const { return tokens * model->top; }
};

std::string Describe(const Case& c) {
  char text[96];
  std::snprintf(text, sizeof(text), "%-17s %-4s %5lld tokens %-6s", c.model->name,
                c.down ? "down" : "up", static_cast<long long>(c.tokens),
                c.listed ? "listed" : "sizes");
  return text;
}

QuantizedMatmul ProblemOf(const Case& c, bool pdl) {
  const Model& model = *c.model;
  QuantizedMatmul p;
  p.m = c.rows();
  p.n = c.down ? model.hidden : model.inner;
  p.k = c.down ? model.inner : model.hidden;
  p.group_size = model.mxfp4 ? 32 : 128;
  if (model.mxfp4) p.codebook = Codebook::kE2m1, p.scale = ElementType::kE8m0;
  if (c.down) p.out = ElementType::kF32;  // rows to combine
  p.epilogue.gated = !c.down;
  if (!c.down) p.epilogue.activation = model.mxfp4 ? Activation::kGptOss : Activation::kSilu;
  p.groups_of_rows = model.experts;
  p.num_weights = model.experts * p.weights_per_element();
  // The first product reads rows of tokens, the second one reads rows of choices.
  if (c.listed) p.listed_per_row = c.down ? 1 : model.top;
  p.pdl = pdl;
  return p;
}

// The experts that tokens choose: different ones for each token.
struct Routing {
  std::vector<int32_t> list, sizes;

  Routing(const Model& model, int64_t tokens, uint32_t seed) : sizes(model.experts) {
    std::mt19937 random(seed);
    std::vector<int32_t> experts(model.experts);
    std::iota(experts.begin(), experts.end(), 0);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int i = 0; i < model.top; ++i) {
        std::swap(experts[i], experts[i + random() % (model.experts - i)]);
        list.push_back(experts[i]);
        ++sizes[experts[i]];
      }
    }
  }

  int64_t experts_read() const {
    return std::count_if(sizes.begin(), sizes.end(), [](int32_t size) { return size > 0; });
  }

  // The weight of each row, or the two if gated.
  std::vector<int32_t> Weights(const QuantizedMatmul& problem) const {
    std::vector<int32_t> rows = list, weights;
    if (problem.listed_per_row == 0) std::sort(rows.begin(), rows.end());
    for (int32_t expert : rows) {
      weights.push_back(expert);
      if (problem.epilogue.gated)
        weights.push_back(static_cast<int32_t>(problem.experts()) + expert);
    }
    return weights;
  }
};

// Routings to take in turn: enough for a mean of the experts that are read, which varies less between many tokens.
std::vector<Routing> RoutingsOf(const Case& c) {
  const int count = c.tokens <= 32 ? 16 : c.tokens <= 256 ? 8 : 2;
  std::vector<Routing> routings;
  for (int i = 0; i < count; ++i) {
    routings.emplace_back(*c.model, c.tokens, static_cast<uint32_t>(1000 * c.tokens + i));
  }
  return routings;
}

// The operands of a case, and calls that read cold weights.
class RaggedData {
 public:
  RaggedData(const Case& c, const QuantizedMatmul& problem, double min_cost)
      : routings_(RoutingsOf(c)),
        weights_(ToDevice(routings_.front().Weights(problem))),
        numbers_(Numbers(routings_, c.listed)),
        copies_(CopiesFor(problem)),
        data_(problem, {}, static_cast<int>(copies_), 1,
              {static_cast<const int32_t*>(numbers_.front().data()),
               static_cast<const int32_t*>(weights_.data())}) {
    const auto for_length = static_cast<int64_t>(kMinGraphMicroseconds / min_cost);
    const int64_t least = std::max<int64_t>(for_length, static_cast<int64_t>(routings_.size()));
    num_calls_ = CeilDiv(least, copies_) * copies_;
  }

  // With the first routing.
  const DeviceProblem& problem() const { return data_; }

  std::vector<Buffers> Calls() const {
    std::vector<Buffers> calls;
    for (int64_t i = 0; i < num_calls_; ++i) {
      calls.push_back(data_.buffers(static_cast<int>(i % copies_)));
      const DeviceBuffer& numbers = numbers_[i % numbers_.size()];
      calls.back().group_sizes = static_cast<const int32_t*>(numbers.data());
    }
    return calls;
  }

  // The mean over the calls.
  double ExpertsRead() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < num_calls_; ++i) sum += routings_[i % routings_.size()].experts_read();
    return static_cast<double>(sum) / static_cast<double>(num_calls_);
  }

 private:
  static std::vector<DeviceBuffer> Numbers(const std::vector<Routing>& routings, bool listed) {
    std::vector<DeviceBuffer> numbers;
    for (const Routing& routing : routings) {
      numbers.push_back(ToDevice(listed ? routing.list : routing.sizes));
    }
    return numbers;
  }

  // The number of stacks of weights: other calls read kColdBytes between two reads of a stack. At least two, since
  // DeviceProblem has large scales in a single one.
  int64_t CopiesFor(const QuantizedMatmul& problem) const {
    int64_t least = problem.experts();
    for (const Routing& routing : routings_) least = std::min(least, routing.experts_read());
    return CeilDiv(kColdBytes, least * (WeightBytes(problem) / problem.experts())) + 1;
  }

  std::vector<Routing> routings_;
  DeviceBuffer weights_;
  std::vector<DeviceBuffer> numbers_;
  int64_t copies_;
  DeviceProblem data_;
  int64_t num_calls_;
};

// The problem of a case, and its choices with their costs.
struct Prediction {
  QuantizedMatmul problem;
  double read;                   // microseconds, which are the least
  std::vector<Choice> choices;   // to time, preferred ones first
  std::vector<double> computed;  // microseconds of each without `read`
  size_t chosen = 0;             // of `choices`
  double min_cost = 0;           // microseconds
};

Prediction Predict(const Case& c, const RaggedOptions& options) {
  const Device& device = DeviceInfo(0);
  Prediction p = {ProblemOf(c, options.pdl), 0, {}, {}};
  if (const Support support = Supports(p.problem, device); !support) {
    std::fprintf(stderr, "driver: %s: %s\n", Describe(c).c_str(), support.reason.c_str());
    return p;
  }
  p.read = ReadCost(p.problem, device);
  std::vector<RaggedChoice> found = RaggedChoices(p.problem, device);
  if (!c.listed && p.problem.m <= kMaxListed) {  // rows may share no CTA
    QuantizedMatmul rows = p.problem;
    rows.listed_per_row = 1;
    for (const RaggedChoice& choice : RaggedChoices(rows, device)) found.push_back(choice);
  }
  const auto is_less = [](const RaggedChoice& a, const RaggedChoice& b) {
    return a.computed < b.computed;
  };
  if (found.empty()) return p;
  p.min_cost = std::max(std::min_element(found.begin(), found.end(), is_less)->computed, p.read);
  const ChoiceNumbers selected = NumbersOf(Select(p.problem, device, kMaxWorkspaceBytes));
  for (const auto& [choice, computed] : found) {
    const bool is_chosen = NumbersOf(choice) == selected;
    if (!options.all && !is_chosen && computed > kMaxCostRatio * p.min_cost) continue;
    if (is_chosen) p.chosen = p.choices.size();
    p.choices.push_back(choice);
    p.computed.push_back(computed);
  }
  return p;
}

// Measured microseconds of a case.
struct Timed {
  double chosen, fastest;
};

void PrintText(const Case& c, const Prediction& p, const std::vector<float>& microseconds,
               double experts_read) {
  const size_t fastest =
      std::min_element(microseconds.begin(), microseconds.end()) - microseconds.begin();
  for (size_t i = 0; i < p.choices.size(); ++i) {
    const Choice& choice = p.choices[i];
    std::printf(
        "%s  %-15s block_m %-3d split_k %d slices %-2d tile %-2d  computed %8.2f read %8.2f "
        "measured %8.2f us%s%s\n",
        Describe(c).c_str(), NameOf(choice.kernel), choice.block_m, choice.split_k, choice.slices,
        choice.tile, p.computed[i], p.read, microseconds[i], i == p.chosen ? "  chosen" : "",
        i == fastest ? "  fastest" : "");
  }
  const double least = microseconds[fastest], chosen = microseconds[p.chosen];
  const double bytes = experts_read * static_cast<double>(WeightBytes(p.problem)) /
                       static_cast<double>(p.problem.experts());
  std::printf(
      "%s  chosen %.2f us / fastest %.2f us = %.3f; %.1f experts read, %.2f TB/s at the fastest\n",
      Describe(c).c_str(), chosen, least, chosen / least, experts_read, 1e-6 * bytes / least);
}

void PrintJson(const Case& c, const Prediction& p, const std::vector<float>& microseconds,
               double experts_read) {
  std::string computed;
  for (double cost : p.computed) {
    char text[32];
    std::snprintf(text, sizeof(text), "%s%.3f", computed.empty() ? "" : ", ", cost);
    computed += text;
  }
  static const std::string device = DeviceJson();
  std::printf(
      "{\"device\": %s, \"problem\": %s, \"model\": \"%s\", \"product\": \"%s\", \"tokens\": %lld, "
      "\"listed_per_row\": %lld, \"experts_read\": %.2f, \"read\": %.3f, \"chosen\": %zu, "
      "\"computed\": [%s], \"choices\": %s}\n",
      device.c_str(), ProblemJson(p.problem, {}).c_str(), c.model->name, c.down ? "down" : "up",
      static_cast<long long>(c.tokens), static_cast<long long>(p.problem.listed_per_row),
      experts_read, p.read, p.chosen, computed.c_str(),
      ChoicesJson(p.choices, microseconds).c_str());
}

// Checks and times the choices of a case, and prints them. Returns nothing if there are none. *correct becomes false if
// a result is wrong; its choice is timed all the same.
std::optional<Timed> TimeCase(const Case& c, const RaggedOptions& options, bool* correct) {
  const Prediction p = Predict(c, options);
  if (p.choices.empty()) return std::nullopt;
  const RaggedData data(c, p.problem, p.min_cost);
  for (const Choice& choice : p.choices) {
    *correct &= IsCorrect(p.problem, data.problem(), choice, kSample);
  }
  std::vector<float> microseconds;
  Check(TimeChoices(p.problem, data.Calls(), p.choices, 0, &microseconds, kEffort), "TimeChoices");
  (options.json ? PrintJson : PrintText)(c, p, microseconds, data.ExpertsRead());
  std::fflush(stdout);
  return Timed{microseconds[p.chosen], *std::min_element(microseconds.begin(), microseconds.end())};
}

// Compiles and loads the kernels of all cases, on all cores, so that no timing waits for or competes with a compiler. Loads
// none if it is late.
void LoadAll(const std::vector<Case>& cases, const RaggedOptions& options,
             const std::function<bool()>& is_late) {
  const Device& device = DeviceInfo(0);
  std::vector<Prediction> predictions;
  for (const Case& c : cases) predictions.push_back(Predict(c, options));
  for (bool pdl : {false, true}) {
    if (pdl && !options.pdl) break;
    for (Prediction& p : predictions) {
      p.problem.pdl = pdl;
      for (const Choice& choice : p.choices) {
        StartCompiling(KeyOf(p.problem, choice, device), device.architecture);
      }
    }
  }
  for (Prediction& p : predictions) {
    for (bool pdl : {false, true}) {
      if (is_late() || (pdl && !options.pdl)) break;
      p.problem.pdl = pdl;
      Check(LoadChoices(p.problem, p.choices, 0), "LoadChoices");
    }
  }
}

// Ratios of the chosen to the fastest choice.
struct Ratios {
  double worst = 1, logs = 0;
  int count = 0;
  std::string where;

  void Add(const Case& c, const Timed& timed) {
    const double ratio = timed.chosen / timed.fastest;
    ++count, logs += std::log(ratio);
    if (ratio > worst) worst = ratio, where = Describe(c);
  }
  void Print(std::FILE* file, const char* form) const {
    if (count == 0) return;
    std::fprintf(file, "%s: chosen / fastest %.3f on average of %d, at most %.3f  %s\n", form,
                 std::exp(logs / count), count, worst, where.c_str());
  }
};

// Prints the times of both products of a model by sizes and by a list, and the selected form. The sizes also need a kernel
// that groups rows.
void PrintForms(const Model& model, int64_t tokens, const std::array<double, 2>& chosen) {
  const std::vector<QuantizedMatmul> products = {ProblemOf({&model, false, false, tokens}, false),
                                                 ProblemOf({&model, true, false, tokens}, false)};
  std::printf("%-17s both %5lld tokens  sizes %.2f us, listed %.2f us: %+.2f us; %s selected\n",
              model.name, static_cast<long long>(tokens), chosen[0], chosen[1],
              chosen[1] - chosen[0], PrefersList(products, DeviceInfo(0)) ? "list" : "sizes");
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

// The cases of one number of tokens and a model.
std::vector<Case> CasesOf(const Model& model, int64_t tokens) {
  std::vector<Case> cases;
  for (bool down : {false, true}) {
    for (bool listed : {false, true}) {
      const Case c = {&model, down, listed, tokens};
      if (!listed || c.rows() <= kMaxListed) cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace

std::string ParseRagged(int argc, char** argv, RaggedOptions* options) {
  for (int i = 2; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--all") {
      options->all = true;
    } else if (flag == "--json") {
      options->json = true;
    } else if (flag == "--pdl") {
      options->pdl = true;
    } else if (i + 1 == argc) {
      return "unknown or incomplete option " + flag;
    } else if (flag == "--seconds") {
      options->seconds = std::atof(argv[++i]);
    } else if (flag == "--models") {
      options->models = Split(argv[++i]);
      for (const std::string& name : options->models) {
        const auto is_named = [&](const Model& model) { return name == model.name; };
        if (!std::any_of(std::begin(kModels), std::end(kModels), is_named)) {
          return "unknown model " + name;
        }
      }
    } else if (flag == "--tokens") {
      options->tokens.clear();
      for (const std::string& number : Split(argv[++i])) {
        options->tokens.push_back(std::atoll(number.c_str()));
        if (options->tokens.back() < 1) return "numbers of tokens are positive";
      }
    } else {
      return "unknown option " + flag;
    }
  }
  return "";
}

// Few tokens come first, since large products heat the device, and clocks recover slowly.
bool TimeRagged(const RaggedOptions& options) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::vector<std::vector<Case>> all;  // by tokens and model
  std::vector<Case> cases;
  for (int64_t tokens : options.tokens) {
    for (const Model& model : kModels) {
      const auto& names = options.models;
      const bool named = std::find(names.begin(), names.end(), model.name) != names.end();
      if (!names.empty() && !named) continue;
      all.push_back(CasesOf(model, tokens));
      cases.insert(cases.end(), all.back().begin(), all.back().end());
    }
  }
  const auto is_late = [&] { return seconds() > options.seconds; };
  LoadAll(cases, options, is_late);
  std::fprintf(stderr, "driver: loaded the kernels in %.1f s\n", seconds());
  bool correct = true;
  Ratios ratios[2];
  int done = 0;
  for (const std::vector<Case>& some : all) {
    std::array<double, 2> chosen = {};  // of both products
    size_t timed_cases = 0;
    for (const Case& c : some) {
      if (is_late()) break;
      const std::optional<Timed> timed = TimeCase(c, options, &correct);
      if (!timed) continue;
      ratios[c.listed].Add(c, *timed);
      chosen[c.listed] += timed->chosen;
      ++timed_cases, ++done;
    }
    if (!options.json && timed_cases == 4) PrintForms(*some[0].model, some[0].tokens, chosen);
  }
  std::FILE* const file = options.json ? stderr : stdout;
  ratios[0].Print(file, "sizes");
  ratios[1].Print(file, "listed");
  std::fprintf(stderr, "driver: timed %d of %zu products in %.1f s\n", done, cases.size(),
               seconds());
  return correct;
}

}  // namespace jaxlowbit::check
