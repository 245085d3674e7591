// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/time_norms.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/check/placed_problem.h"
#include "cuda/check/replay.h"
#include "cuda/check/vectors.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/ops/rms_norm.h"

namespace jaxlowbit::check {
namespace {

constexpr float kEpsilon = 1e-5f;

// The pointers of several launches, numbered.
class Pointers {
 public:
  Address Of(const void* data) {
    if (data == nullptr) return {};
    const auto found = std::find(pointers_.begin(), pointers_.end(), data);
    if (found != pointers_.end()) return {static_cast<int>(found - pointers_.begin()), 0};
    pointers_.push_back(const_cast<void*>(data));
    return {static_cast<int>(pointers_.size()) - 1, 0};
  }

  PlannedProduct Of(const QuantizedMatmul& problem, const Buffers& buffers) {
    PlannedProduct product = {problem, {}};
    product.buffers.codebook = buffers.codebook;
#define JAXLOWBIT_BUFFER(type, name) product.buffers.name = Of(buffers.name);
#include "cuda/buffers.def"
    return product;
  }

  void* const* data() const { return pointers_.data(); }

 private:
  std::vector<void*> pointers_;
};

// Launches in order, loaded once.
class Chain {
 public:
  Chain() : workspace_(kMaxWorkspaceBytes) {}

  // Appends products with one lhs, behind a normalization of their rows if `norm` is given: merged if `merges` and
  // possible. Returns whether it is merged.
  bool Add(const std::vector<Operands>& products, const RmsNorm* norm, bool merges) {
    const Device& device = DeviceInfo(0);
    std::vector<PlannedProduct> planned;
    for (const Operands& product : products) {
      planned.push_back(pointers_.Of(product.problem, product.buffers));
    }
    const Room room = {pointers_.Of(workspace_.data()), workspace_.bytes()};
    PlannedNorm own;
    if (norm != nullptr) {
      own = {norm->type,
             norm->addend_type,
             norm->scale_type,
             norm->rows,
             norm->columns,
             norm->epsilon,
             pointers_.Of(norm->x),
             pointers_.Of(norm->addend),
             pointers_.Of(norm->scale),
             pointers_.Of(norm->sum)};
    }
    Ways ways(pointers_.data());
    std::vector<PlannedStep> plan;
    const std::string error = PlanProducts(std::move(planned), {&device}, room, &ways, &plan);
    Check(error.empty() ? cudaSuccess : cudaErrorInvalidValue, "PlanProducts");
    const bool merged = norm != nullptr && merges && MergeNorm(own, device, &ways, &plan);
    if (norm != nullptr && !merged) {
      launches_.push_back([norm = *norm, &device](cudaStream_t stream) {
        return LaunchRmsNorm(norm, device, stream);
      });
    }
    std::vector<std::unique_ptr<const LoadedStep>> steps;
    Check(LoadSteps(plan, device, &steps), "LoadSteps");
    for (auto& step : steps) {
      launches_.push_back([this, run = std::shared_ptr<const LoadedStep>(std::move(step))](
                              cudaStream_t stream) { return run->Run(pointers_.data(), stream); });
    }
    return merged;
  }

  void Enqueue(cudaStream_t stream) const {
    for (const auto& launch : launches_) Check(launch(stream), "launch");
  }

 private:
  Pointers pointers_;
  DeviceBuffer workspace_;
  std::vector<std::function<cudaError_t(cudaStream_t)>> launches_;
};

// --- checks --------------------------------------------------------------------------------------

enum class Values { kNormal, kLarge, kNan, kInfinite, kZero };

struct Case {
  ElementType type;
  int64_t rows, columns;
  std::vector<int64_t> n;  // of products with one lhs
  int bits;
  int64_t group_size;
  ZeroKind zero;
  bool gated, wide_scale;
  Values values;
};

QuantizedMatmul ProblemOf(const Case& c, int64_t n) {
  QuantizedMatmul p;
  p.lhs = p.out = p.scale = p.epilogue.bias = p.epilogue.residual = c.type;
  p.m = c.rows, p.n = n, p.k = c.columns;
  p.bits = c.bits, p.group_size = GroupSize(c.group_size, p.k, p.scale);
  p.zero = c.zero;
  p.pdl = true;
  p.epilogue.gated = c.gated;
  if (c.gated) p.epilogue.activation = Activation::kSilu;
  p.num_weights = p.weights_per_element();
  return p;
}

// Starts compiling what a case launches and the binary lacks, on all cores.
void StartCompilingCase(const Case& c) {
  StartCompiling([&](const Target& target) {
    std::vector<PlannedProduct> products;
    int buffers = 0;
    const auto next = [&] { return Address{buffers++, 0}; };
    const Address lhs = next();
    for (int64_t n : c.n) {
      products.push_back({ProblemOf(c, n), {}});
      products.back().buffers.lhs = lhs;
      products.back().buffers.out = next();
    }
    Ways typical(nullptr);
    std::vector<PlannedStep> apart;
    PlanProducts(std::move(products), target, {{}, kMaxWorkspaceBytes}, &typical, &apart);
    std::vector<PlannedStep> plan = apart;
    MergeNorm({c.type, c.type, c.type, c.rows, c.columns, kEpsilon, next(), next(), next(), next()},
              *target.device, &typical, &plan);
    plan.insert(plan.end(), apart.begin(), apart.end());
    return plan;
  });
}

template <typename T>
std::vector<T> Floats(int64_t count, uint32_t seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(T(size * normal(random)));
  return values;
}

DeviceBuffer Random(int64_t count, ElementType type, uint32_t seed, float size) {
  if (type == ElementType::kF32) return ToDevice(Floats<float>(count, seed, size));
  if (type == ElementType::kF16) return ToDevice(Floats<__half>(count, seed, size));
  return ToDevice(Floats<__nv_bfloat16>(count, seed, size));
}

// The rows x, of which the last one has special values.
DeviceBuffer Rows(const Case& c, uint32_t seed) {
  const float size = c.values == Values::kZero                                   ? 0
                     : c.values == Values::kLarge && c.type != ElementType::kF16 ? 1e25f
                                                                                 : 3;
  DeviceBuffer rows = Random(c.rows * c.columns, c.type, seed, size);
  const uint16_t nan = 0x7fff, infinite = c.type == ElementType::kF16 ? 0xfc00 : 0xff80;
  if (c.values == Values::kNan || c.values == Values::kInfinite) {
    auto* last = static_cast<uint16_t*>(rows.data()) + c.rows * c.columns - 3;
    Check(cudaMemcpy(last, c.values == Values::kNan ? &nan : &infinite, 2, cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
  return rows;
}

// What a chain of a case writes: the sums with elements behind them, which it must not write, and the products.
struct Written {
  std::vector<std::vector<uint8_t>> bytes;
  bool merged;
};

constexpr int64_t kBehind = 64;  // bytes

class CaseData {
 public:
  CaseData(const Case& c, uint32_t seed)
      : case_(c),
        x_(Rows(c, seed)),
        addend_(Random(c.rows * c.columns, c.type, seed + 1, c.values == Values::kZero ? 0 : 1)),
        late_(addend_.bytes()),
        scale_(Random(c.columns, c.wide_scale ? ElementType::kF32 : c.type, seed + 2, 1)),
        sum_(addend_.bytes() + kBehind),
        normed_(addend_.bytes()) {
    for (size_t i = 0; i < c.n.size(); ++i) {
      problems_.push_back(ProblemOf(c, c.n[i]));
      data_.emplace_back(problems_[i], Optional(), 1, seed + i);
    }
  }

  Written Run(bool merges) const {
    const int64_t behind = kBehind;
    Check(cudaMemset(sum_.data(), 0xff, sum_.bytes()), "cudaMemset");
    Check(cudaMemset(late_.data(), 0xff, late_.bytes()), "cudaMemset");
    Check(cudaMemset(normed_.data(), 0xff, normed_.bytes()), "cudaMemset");
    RmsNorm norm = {case_.type,    case_.wide_scale ? ElementType::kF32 : case_.type,
                    case_.type,    case_.rows,
                    case_.columns, x_.data(),
                    late_.data(),  scale_.data(),
                    sum_.data(),   normed_.data(),
                    kEpsilon};
    std::vector<Operands> products;
    for (size_t i = 0; i < data_.size(); ++i) {
      data_[i].Poison();
      products.push_back({problems_[i], data_[i].buffers(0)});
      products.back().buffers.lhs = normed_.data();
    }
    Chain chain;
    Written written;
    written.merged = chain.Add(products, &norm, merges);
    Check(cudaDeviceSynchronize(), "before");
    DelayedCopy({addend_.data(), addend_.bytes()},
                late_.data());  // the kernels start before its end
    chain.Enqueue(nullptr);
    Check(cudaDeviceSynchronize(), "normalized products");
    written.bytes.push_back(ToHost<uint8_t>(sum_));
    for (size_t i = 0; i < data_.size(); ++i) {
      const QuantizedMatmul& p = problems_[i];
      std::vector<uint8_t> out(p.m * p.n * SizeOf(p.out));
      Check(cudaMemcpy(out.data(), data_[i].buffers(0).out, out.size(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
      written.bytes.push_back(std::move(out));
    }
    const auto& sums = written.bytes[0];
    if (!std::all_of(sums.end() - behind, sums.end(), [](uint8_t x) { return x == 0xff; })) {
      written.bytes[0].clear();  // differs from every right one
    }
    return written;
  }

 private:
  const Case case_;
  DeviceBuffer x_, addend_, late_, scale_, sum_, normed_;
  std::vector<QuantizedMatmul> problems_;
  std::vector<DeviceProblem> data_;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const std::vector<std::vector<int64_t>> widths = {
      {256}, {256, 130, 64}, {320}, {4096, 1024, 1024}};
  size_t turn = 0;
  for (const ElementType type : {ElementType::kBf16, ElementType::kF16}) {
    for (const int64_t columns : {64, 320, 1024, 2880, 4096, 5120, 8192, 8256, 12288, 16384}) {
      for (const int64_t rows : {1, 2}) {
        for (const int bits : {4, 8, 2}) {
          for (size_t i = 0; i < widths.size(); ++i, ++turn) {
            constexpr int64_t kSizes[] = {64, 32, -1, 128};
            constexpr ZeroKind kZeros[] = {ZeroKind::kNone, ZeroKind::kInteger, ZeroKind::kFloat};
            cases.push_back({type, rows, columns, widths[i], bits, kSizes[(turn + turn / 4) % 4],
                             kZeros[turn % 7 % 3], i == 2, turn % 3 == 0,
                             static_cast<Values>(turn % 5)});
          }
        }
      }
    }
  }
  return cases;
}

// --- times ---------------------------------------------------------------------------------------

struct Model {
  const char* name;
  int64_t columns, hidden;
  std::vector<int64_t> heads;  // columns of queries, keys and values
};

// The products of the layers of a model, one kind after the other; a copy of the weights is a layer.
class Layers {
 public:
  Layers(const Model& model, int64_t rows, int bits)
      : rows_(rows), columns_(model.columns), x_(Random(rows * columns_, kType, 1, 1)) {
    const int64_t attended = model.heads[0];
    Describe(bits, columns_, attended, false);
    Describe(bits, model.hidden, columns_, true);
    Describe(bits, columns_, model.hidden, false);
    for (int64_t n : model.heads) Describe(bits, n, columns_, false);
    int64_t bytes = 0;
    for (const QuantizedMatmul& problem : problems_) bytes += WeightBytes(problem);
    constexpr int64_t kBytes = int64_t{480} << 20;  // 8 times L2
    count_ = static_cast<int>(std::max<int64_t>(4, CeilDiv(kBytes, bytes)));
    for (size_t i = 0; i < problems_.size(); ++i) {
      data_.emplace_back(problems_[i], Optional(), count_, i + 1);
    }
    for (int i = 0; i < 4; ++i) buffers_.emplace_back(rows * columns_ * 2);
    scale_.push_back(Random(columns_, ElementType::kF32, 2, 1));
  }

  int count() const { return count_; }

  // Adds all layers to a chain. `merges`: the normalization of the MLP, and that of the next attention. Returns how many
  // are merged.
  int AddTo(Chain* chain, bool merges_mlp, bool merges_next) const {
    int merged = 0;
    const void* x = x_.data();
    for (int layer = 0; layer < count_; ++layer) {
      std::vector<Operands> own;
      for (size_t i = 0; i < problems_.size(); ++i) {
        own.push_back({problems_[i], data_[i].buffers(layer)});
      }
      void *projected = buffers_[0].data(), *normed = buffers_[1].data();
      void *total = buffers_[2].data(), *next = buffers_[3].data();
      if (layer == 0) own[0].problem.pdl = false;
      if (layer > 0) own[0].buffers.lhs = own[3].buffers.out;  // the queries
      own[0].buffers.out = own[2].buffers.out = projected;
      own[2].buffers.lhs = own[1].buffers.out;
      for (size_t i : {1, 3, 4, 5}) own[i].buffers.lhs = normed;
      chain->Add({own[0]}, nullptr, false);
      const RmsNorm mlp = Norm(x, projected, total, normed);
      merged += chain->Add({own[1]}, &mlp, merges_mlp);
      chain->Add({own[2]}, nullptr, false);
      const RmsNorm following = Norm(total, projected, next, normed);
      merged += chain->Add({own[3], own[4], own[5]}, &following, merges_next);
      x = next;
    }
    return merged;
  }

 private:
  static constexpr ElementType kType = ElementType::kBf16;

  void Describe(int bits, int64_t n, int64_t k, bool gated) {
    QuantizedMatmul p;
    p.m = rows_, p.n = n, p.k = k;
    p.bits = bits, p.group_size = bits == 4 ? 128 : -1;
    p.pdl = true;
    p.epilogue.gated = gated;
    if (gated) p.epilogue.activation = Activation::kSilu;
    p.num_weights = p.weights_per_element();
    problems_.push_back(p);
  }

  RmsNorm Norm(const void* x, const void* addend, void* sum, void* out) const {
    return {kType,  ElementType::kF32, kType, rows_, columns_, x,
            addend, scale_[0].data(),  sum,   out,   kEpsilon};
  }

  const int64_t rows_, columns_;
  int count_ = 0;
  std::vector<QuantizedMatmul> problems_;
  std::vector<DeviceProblem> data_;
  DeviceBuffer x_;
  std::vector<DeviceBuffer> buffers_, scale_;
};

void TimeModel(const Model& model, int64_t rows, int bits) {
  constexpr int kReplays = 30, kWarmUps = 15, kRounds = 2;
  const Layers layers(model, rows, bits);
  std::vector<Chain> chains(4);
  int merged[4];
  for (int i = 0; i < 4; ++i) merged[i] = layers.AddTo(&chains[i], i % 2 != 0, i / 2 != 0);
  std::printf("%-12s %d bits, %lld rows:", model.name, bits, static_cast<long long>(rows));
  for (int round = 0; round < kRounds; ++round) {  // in turns, so that clocks affect all alike
    for (int i = 0; i < 4; ++i) {
      const auto enqueue = [&](cudaStream_t stream) { chains[i].Enqueue(stream); };
      const double us = TimeReplays(enqueue, kWarmUps, kReplays) / layers.count();
      constexpr const char* kNames[] = {"separate", "mlp", "next", "both"};
      std::printf("  %s %.2f", kNames[i], us);
    }
    std::printf(round == 0 ? " |" : " us a layer");
  }
  std::printf("; merged %d, %d and %d of %d\n", merged[1], merged[2], merged[3],
              2 * layers.count());
  std::fflush(stdout);
}

}  // namespace

std::pair<int, int> CheckNorms(uint64_t stride) {
  int correct = 0, wrong = 0, merged = 0;
  uint32_t turn = 0;
  const std::vector<Case> cases = Cases();
  for (size_t i = stride - 1; i < cases.size(); i += stride) StartCompilingCase(cases[i]);
  for (const Case& c : cases) {
    if (++turn % stride != 0) continue;
    const CaseData data(c, turn);
    const Written want = data.Run(false), got = data.Run(true), again = data.Run(true);
    merged += got.merged;
    const bool ok = !want.bytes[0].empty() && got.bytes == want.bytes && again.bytes == got.bytes;
    ++(ok ? correct : wrong);
    if (ok) continue;
    std::printf(
        "WRONG  %lld rows of %lld, %zu products of %lld, type %d, %d bits, groups of %lld, "
        "zero %d, gated %d, wide %d, values %d, merged %d:",
        static_cast<long long>(c.rows), static_cast<long long>(c.columns), c.n.size(),
        static_cast<long long>(c.n[0]), static_cast<int>(c.type), c.bits,
        static_cast<long long>(c.group_size), static_cast<int>(c.zero), c.gated, c.wide_scale,
        static_cast<int>(c.values), got.merged);
    for (size_t i = 0; i < want.bytes.size(); ++i) {
      std::printf(" %s", got.bytes[i] == want.bytes[i] ? "same" : "different");
    }
    std::printf(again.bytes == got.bytes ? "\n" : ", and two runs differ\n");
  }
  std::printf("%d of %d merged\n", merged, correct + wrong);
  return {correct, wrong};
}

void TimeNorms() {
  const Model models[] = {{"llama3-1b", 2048, 8192, {2048, 512, 512}},
                          {"qwen3-4b", 2560, 9728, {4096, 1024, 1024}},
                          {"llama3-8b", 4096, 14336, {4096, 1024, 1024}},
                          {"qwen3-14b", 5120, 17408, {5120, 1024, 1024}},
                          {"llama3-70b", 8192, 28672, {8192, 1024, 1024}}};
  for (const Model& model : models) {
    for (const int64_t rows : {1, 2}) {
      for (const int bits : {4, 8}) TimeModel(model, rows, bits);
    }
  }
}

}  // namespace jaxlowbit::check
