// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/time_choices.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <set>
#include <string>

#include "cuda/launch.h"
#include "cuda/select/select.h"
#include "cuda/timing.h"

namespace jaxlowbit::check {
namespace {

constexpr int64_t kColdBytes = int64_t{240} << 20;  // four times the L2 of an H200
constexpr double kMinGraphMicroseconds = 400;       // makes the launch of a graph negligible
constexpr int64_t kMaxCalls = 512;                  // per graph
constexpr TimingEffort kEffort = {10, 3, 20, 250};
constexpr double kMaxCostRatio = 3;  // relative to the cheapest choice
constexpr size_t kMaxPerKernel = 24;
constexpr int64_t kDecodeRows = 32;  // maximum m of a decode step

// The costs of the choices of one kernel, ascending.
using Ranked = std::vector<std::pair<double, Choice>>;

Ranked Rank(Kernel kernel, const QuantizedMatmul& problem, const Device& device) {
  Ranked ranked;
  for (const Choice& choice : AllChoices(kernel, problem, device, kMaxWorkspaceBytes)) {
    ranked.emplace_back(Cost(problem, device, choice), choice);
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  return ranked;
}

// The cheapest half of kMaxPerKernel choices, and the same number spread over higher costs.
void Thin(Ranked* ranked) {
  if (ranked->size() <= kMaxPerKernel) return;
  constexpr size_t kCheapest = kMaxPerKernel / 2, kSpread = kMaxPerKernel - kCheapest;
  const size_t others = ranked->size() - kCheapest;
  for (size_t i = 0; i < kSpread; ++i) {
    (*ranked)[kCheapest + i] = (*ranked)[kCheapest + (i + 1) * others / kSpread - 1];
  }
  ranked->resize(kMaxPerKernel);
}

// The choices to time: each kernel's own choice, and a subset of those with costs up to kMaxCostRatio times the
// minimum. The fastest is among the cheap ones; the others are data for the cost model.
std::vector<Choice> ChoicesToTime(const QuantizedMatmul& problem, const Device& device,
                                  double* min_cost) {
  std::vector<Ranked> kernels;
  *min_cost = std::numeric_limits<double>::infinity();
  for (int number = 0; number < kNumKernels; ++number) {
    kernels.push_back(Rank(static_cast<Kernel>(number), problem, device));
    if (!kernels.back().empty()) *min_cost = std::min(*min_cost, kernels.back().front().first);
  }
  std::vector<Choice> choices;
  std::set<ChoiceNumbers> added;
  const auto add = [&](const Choice& choice) {
    if (added.insert(NumbersOf(choice)).second) choices.push_back(choice);
  };
  for (Ranked& ranked : kernels) {
    while (!ranked.empty() && ranked.back().first > kMaxCostRatio * *min_cost) ranked.pop_back();
    if (ranked.empty()) continue;
    add(Configure(ranked.front().second.kernel, problem, device, kMaxWorkspaceBytes));
    Thin(&ranked);
    for (const auto& [cost, choice] : ranked) add(choice);
  }
  return choices;
}

// The number of distinct weights that, with their activations and results, evict the first weight from L2.
int64_t CopiesOf(const QuantizedMatmul& problem) {
  const int64_t activations =
      problem.batch * problem.m * (problem.lhs_columns() + problem.out_columns()) * 2;
  return std::min(CeilDiv(kColdBytes, WeightBytes(problem) + activations) + 1, kMaxCalls);
}

const char* NameOf(ElementType type) { return kElementTypeNames[static_cast<int>(type)]; }

const char* NameOf(ZeroKind zero) {
  return zero == ZeroKind::kNone ? "none" : zero == ZeroKind::kInteger ? "integer" : "float";
}

std::string Json(bool value) { return value ? "true" : "false"; }

template <typename Number>
std::string Json(Number value) {
  return std::to_string(value);
}

std::string Json(const char* text) { return '"' + std::string(text) + '"'; }

}  // namespace

std::string DeviceJson() {
  const Device& device = DeviceInfo(0);
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const auto clusters = [&](int ctas_per_sm) {
    const int* row = device.clusters[ctas_per_sm];
    return "[" + Json(row[1]) + ", " + Json(row[2]) + ", " + Json(row[4]) + "]";
  };
  return "{\"device_name\": " + Json(static_cast<const char*>(properties.name)) +
         ", \"compute_capability\": " + Json(device.compute_capability) +
         ", \"num_sms\": " + Json(device.num_sms) +
         ", \"shared_bytes_per_sm\": " + Json(device.shared_bytes_per_sm) +
         ", \"clock_mhz\": " + Json(device.clock_mhz) +
         ", \"memory_gb_per_s\": " + Json(device.memory_gb_per_s) + ", \"clusters\": [" +
         clusters(1) + ", " + clusters(2) + "]}";
}

std::string ProblemJson(const QuantizedMatmul& p, const Optional& optional) {
  std::string json = "{\"m\": " + Json(p.m) + ", \"n\": " + Json(p.n) + ", \"k\": " + Json(p.k) +
                     ", \"bits\": " + Json(p.bits) + ", \"group_size\": " + Json(p.group_size) +
                     ", \"lhs\": " + Json(NameOf(p.lhs)) +
                     ", \"float32_scale\": " + Json(p.scale == ElementType::kF32) +
                     ", \"zero\": " + Json(NameOf(p.zero)) + ", \"early_start\": " + Json(p.pdl);
  if (Is8Bit(p.scale)) {
    const char* name = p.scale == ElementType::kE8m0   ? "e8m0"
                       : p.scale == ElementType::kE4m3 ? "e4m3"
                                                       : "int8";
    json += ", \"narrow_scale\": " + Json(name);
  }
  if (p.codebook != Codebook::kNone) {
    json += ", \"codebook\": " + Json(kCodebookNames[static_cast<int>(p.codebook)]);
  }
  if (p.is_ragged()) {
    json += ", \"groups_of_rows\": " + Json(p.groups_of_rows) +
            ", \"num_weights\": " + Json(p.num_weights) + ", \"out\": " + Json(NameOf(p.out));
  }
  const std::pair<const char*, bool> marks[] = {
      {"gated", p.epilogue.gated},
      {"scale_accumulators", p.scale_accumulators},
      {"accumulate_float16", p.accumulate_float16},
      {"transposed", p.transposed},
      {"permuted", p.permuted_parts > 0},
      {"bias", optional.bias},
      {"residual", optional.residual},
      {"activation", p.epilogue.activation != Activation::kNone}};
  for (const auto& [name, value] : marks) {
    if (value) json += ", \"" + std::string(name) + "\": true";
  }
  return json + "}";
}

std::string ChoicesJson(const std::vector<Choice>& choices,
                        const std::vector<float>& microseconds) {
  std::string json = "[";
  for (size_t i = 0; i < choices.size(); ++i) {
    json += i > 0 ? ", [" : "[";
    for (int64_t number : NumbersOf(choices[i])) json += Json(number) + ", ";
    char text[32];
    std::snprintf(text, sizeof(text), "%.3f]", microseconds[i]);
    json += text;
  }
  return json + "]";
}

const std::vector<std::pair<int64_t, int64_t>>& SweepLayers() {
  static const std::vector<std::pair<int64_t, int64_t>> layers = {
      {4096, 4096},   // Llama 3 8B: output
      {14336, 4096},  // Llama 3 8B: gate
      {4096, 14336},  // Llama 3 8B: down
      {8192, 8192},   // Llama 3 70B: output
      {28672, 8192},  // Llama 3 70B: gate
      {8192, 28672},  // Llama 3 70B: down
      {1280, 8192},   // Llama 3 70B: queries, keys and values, on 8 devices
      {9472, 3584},   // Qwen2.5 7B: gate and up, on 4
      {3584, 18944},  // Qwen2.5 7B: down
      {5120, 1728},   // Llama 2 13B: down, on 8
      {1536, 1536},   // Qwen2.5 1.5B: output
      {2048, 1408}};  // DeepSeek-V2-Lite: down of an expert
  return layers;
}

const std::vector<int64_t>& SweepRows() {
  static const std::vector<int64_t> rows = {1, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1024, 4096};
  return rows;
}

// Small m comes first, since products with large m heat the device, and clocks recover slowly.
std::vector<QuantizedMatmul> StandardProblems() {
  std::vector<QuantizedMatmul> problems;
  for (int64_t m : SweepRows()) {
    for (const auto& [n, k] : SweepLayers()) {
      for (int bits : {4, 8}) {
        QuantizedMatmul problem;
        problem.m = m, problem.n = n, problem.k = k;
        problem.bits = bits;
        problem.group_size = bits == 4 ? 128 : -1;
        problems.push_back(problem);
        problem.pdl = true;
        if (m <= kDecodeRows) problems.push_back(problem);
      }
    }
  }
  return problems;
}

void TimeProblems(const std::vector<QuantizedMatmul>& problems, const Optional& optional,
                  double seconds) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const Device& device = DeviceInfo(0);
  const std::string device_json = DeviceJson();
  size_t done = 0;
  for (const QuantizedMatmul& problem : problems) {
    if (std::chrono::duration<double>(Clock::now() - start).count() > seconds) break;
    double min_cost = 0;
    const std::vector<Choice> choices = ChoicesToTime(problem, device, &min_cost);
    const int64_t copies = CopiesOf(problem);
    const auto for_length = static_cast<int64_t>(kMinGraphMicroseconds / min_cost);
    const int64_t num_calls = std::clamp(for_length, copies, kMaxCalls);
    const DeviceProblem data(problem, optional, static_cast<int>(copies), 1);
    std::vector<Buffers> calls;
    for (int64_t i = 0; i < num_calls; ++i) {
      calls.push_back(data.buffers(static_cast<int>(i % copies)));
    }
    Check(cudaDeviceSynchronize(), "data");
    std::vector<float> microseconds;
    Check(LoadChoices(problem, choices, 0), "LoadChoices");
    Check(TimeChoices(problem, calls, choices, 0, &microseconds, kEffort), "TimeChoices");
    std::printf("{\"device\": %s, \"problem\": %s, \"choices\": %s}\n", device_json.c_str(),
                ProblemJson(problem, optional).c_str(), ChoicesJson(choices, microseconds).c_str());
    std::fflush(stdout);
    ++done;
  }
  std::fprintf(stderr, "driver: timed %zu of %zu problems in %.1f s\n", done, problems.size(),
               std::chrono::duration<double>(Clock::now() - start).count());
}

}  // namespace jaxlowbit::check
