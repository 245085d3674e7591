// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/time_route.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/check/replay.h"
#include "cuda/check/vectors.h"
#include "cuda/ops/route_choices.h"

namespace jaxlowbit::check {
namespace {

constexpr int kReplays = 50, kWarmUps = 30, kCalls = 64;
constexpr int kBehind = 4;  // elements behind results, which must not be written
constexpr int32_t kUnwritten = -7;

struct Shape {
  int tokens, columns, experts, top;
};

// The types and flags of a case.
struct Kind {
  ElementType x, router, bias;
  bool biased, normalized, has_nan;
  int shift;  // elements between an aligned address and the router
};

// Numbers whose products and sums are exact in float32, so that choices are known exactly. Many logits are equal.
struct Problem {
  Problem(const Shape& shape, const Kind& kind, uint32_t seed)
      : s(shape), kind(kind), router(int64_t{s.columns} * s.experts), x(s.tokens * s.columns) {
    std::mt19937 random(seed);
    for (float& w : router) w = static_cast<float>(static_cast<int>(random() % 17) - 8) / 8;
    for (int e = 0; e < s.experts; ++e) {
      bias.push_back(kind.biased ? static_cast<float>(static_cast<int>(random() % 9) - 4) : 0);
    }
    for (int i = 0; i < s.tokens * 9; ++i) {  // few columns, so that logits are near each other
      x[i % s.tokens * s.columns + random() % s.columns] = static_cast<float>(random() % 5) - 2;
    }
    if (kind.has_nan) router[random() % router.size()] = NAN;
    for (int t = 0; t < s.tokens; ++t) Choose(t);
  }

  void Choose(int token) {
    std::vector<double> logits(bias.begin(), bias.end());
    for (int k = 0; k < s.columns; ++k) {
      const double value = x[token * s.columns + k];
      for (int e = 0; e < s.experts; ++e) logits[e] += value * router[int64_t{k} * s.experts + e];
    }
    std::vector<int> order(s.experts);
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](int e) { return std::isnan(logits[e]) ? INFINITY : logits[e]; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
    const double largest = logits[order[0]];
    double total = 0;
    for (int i = 0; i < (kind.normalized ? s.top : s.experts); ++i) {
      total += std::exp(logits[order[i]] - largest);
    }
    for (int i = 0; i < s.top; ++i) {
      expert.push_back(order[i]);
      weight.push_back(std::exp(logits[order[i]] - largest) / total);
    }
  }

  Shape s;
  Kind kind;
  std::vector<float> router, bias, x;
  std::vector<int32_t> expert;
  std::vector<double> weight;
};

// The bytes of floats of a type, `shift` elements behind an aligned address.
DeviceBuffer Floats(const std::vector<float>& values, ElementType type, int shift) {
  const size_t size = SizeOf(type);
  std::vector<char> bytes((values.size() + shift) * size);
  char* to = bytes.data() + shift * size;
  for (const float value : values) {
    const __nv_bfloat16 bf16(value);
    const __half f16(value);
    const void* from = type == ElementType::kF32    ? static_cast<const void*>(&value)
                       : type == ElementType::kBf16 ? static_cast<const void*>(&bf16)
                                                    : static_cast<const void*>(&f16);
    std::memcpy(to, from, size);
    to += size;
  }
  return ToDevice(bytes);
}

// The results of a launch.
struct Routed {
  std::vector<int32_t> expert, weight;  // and kBehind elements; bits of weights
};

Routed Run(const Problem& p) {
  const DeviceBuffer x = Floats(p.x, p.kind.x, 1);
  const DeviceBuffer router = Floats(p.router, p.kind.router, p.kind.shift);
  const DeviceBuffer bias = Floats(p.bias, p.kind.bias, 1);
  const std::vector<int32_t> unwritten(p.expert.size() + kBehind, kUnwritten);
  const DeviceBuffer expert = ToDevice(unwritten), weight = ToDevice(unwritten);
  RouteChoices route = {p.kind.x,    p.kind.router, p.kind.bias,       p.s.tokens, p.s.top,
                        p.s.experts, p.s.columns,   p.kind.normalized, false};
  route.x = static_cast<const char*>(x.data()) + SizeOf(p.kind.x);
  route.router = static_cast<const char*>(router.data()) + p.kind.shift * SizeOf(p.kind.router);
  if (p.kind.biased) route.bias = static_cast<const char*>(bias.data()) + SizeOf(p.kind.bias);
  route.expert = static_cast<int32_t*>(expert.data());
  route.weight = static_cast<float*>(weight.data());
  Check(LaunchRouteChoices(route, nullptr), "LaunchRouteChoices");
  Check(cudaDeviceSynchronize(), "LaunchRouteChoices");
  return {ToHost<int32_t>(expert), ToHost<int32_t>(weight)};
}

bool IsCorrect(const Problem& p) {
  const Routed found = Run(p), again = Run(p);
  if (found.expert != again.expert || found.weight != again.weight) return false;
  for (size_t i = 0; i < found.expert.size(); ++i) {
    if (i >= p.expert.size()) {
      if (found.expert[i] != kUnwritten || found.weight[i] != kUnwritten) return false;
      continue;
    }
    float weight;
    std::memcpy(&weight, &found.weight[i], sizeof(weight));
    const double want = p.weight[i];
    const bool near =
        std::isnan(want) ? std::isnan(weight) : std::abs(weight - want) <= 4e-6 * want + 1e-37;
    if (found.expert[i] != p.expert[i] || !near) return false;
  }
  return true;
}

}  // namespace

std::pair<int, int> CheckRoute(uint64_t stride) {
  constexpr ElementType kTypes[] = {ElementType::kF32, ElementType::kBf16, ElementType::kF16};
  const Shape shapes[] = {{1, 2048, 128, 8},  {1, 4096, 8, 2},    {2, 2880, 32, 4},
                          {1, 2880, 128, 4},  {16, 2048, 128, 8}, {3, 64, 16, 16},
                          {2, 5120, 512, 32}, {2, 16384, 256, 1}, {17, 8, 8, 8},
                          {1, 2888, 64, 3},   {1, 8192, 512, 10}, {70, 512, 32, 6}};
  int correct = 0, wrong = 0;
  uint32_t turn = 0;
  for (const Shape& shape : shapes) {
    for (const ElementType router : kTypes) {
      for (const bool normalized : {true, false}) {
        for (const int shift : {0, 1}) {
          if (turn++ % stride != 0) continue;
          const Kind kind = {
              kTypes[1 + turn % 2], router, kTypes[turn % 3], turn % 4 > 0, normalized,
              turn % 5 == 0,        shift};
          const bool ok = IsCorrect(Problem(shape, kind, turn));
          ++(ok ? correct : wrong);
          if (ok) continue;
          std::printf(
              "wrong: %d tokens of %d columns, %d of %d experts, x of type %d, router %d, bias %d, "
              "biased %d, normalized %d, NaN %d, shift %d\n",
              shape.tokens, shape.columns, shape.top, shape.experts, static_cast<int>(kind.x),
              static_cast<int>(kind.router), static_cast<int>(kind.bias), kind.biased,
              kind.normalized, kind.has_nan, kind.shift);
        }
      }
    }
  }
  return {correct, wrong};
}

// Each call has a separate router, which L2 may not have, like the layers of a model.
void TimeRoute() {
  const Shape shapes[] = {{1, 2048, 128, 8}, {1, 4096, 8, 2}, {1, 2880, 32, 4}, {1, 2880, 128, 4}};
  for (Shape shape : shapes) {
    const int64_t router_bytes = int64_t{4} * shape.columns * shape.experts;
    const DeviceBuffer routers(kCalls * router_bytes);
    Check(cudaMemset(routers.data(), 0, routers.bytes()), "cudaMemset");
    for (const int tokens : {1, 2, 4, 8, 16}) {
      const DeviceBuffer x(2 * tokens * shape.columns);
      const DeviceBuffer expert(4 * tokens * shape.top), weight(4 * tokens * shape.top);
      Check(cudaMemset(x.data(), 0, x.bytes()), "cudaMemset");
      const auto time = [&](bool pdl) {
        const auto enqueue = [&](cudaStream_t stream) {
          for (int call = 0; call < kCalls; ++call) {
            RouteChoices route = {ElementType::kBf16, ElementType::kF32, ElementType::kF32, tokens,
                                  shape.top,          shape.experts,     shape.columns,     true,
                                  pdl && call > 0};
            route.x = x.data();
            route.router = static_cast<const char*>(routers.data()) + call * router_bytes;
            route.expert = static_cast<int32_t*>(expert.data());
            route.weight = static_cast<float*>(weight.data());
            Check(LaunchRouteChoices(route, stream), "LaunchRouteChoices");
          }
        };
        return TimeReplays(enqueue, kWarmUps, kReplays) / kCalls;
      };
      std::printf("%5d tokens, %d of %3d experts, %4d columns: route %7.2f us, with PDL %7.2f us\n",
                  tokens, shape.top, shape.experts, shape.columns, time(false), time(true));
      std::fflush(stdout);
    }
  }
}

}  // namespace jaxlowbit::check
