// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/time_experts.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/check/replay.h"
#include "cuda/check/time_route.h"
#include "cuda/check/vectors.h"
#include "cuda/ops/combine_choices.h"
#include "cuda/ops/group_choices.h"

namespace jaxlowbit::check {
namespace {

constexpr int kReplays = 50, kWarmUps = 30, kCalls = 16;

struct Shape {
  int tokens, top, experts;
  int64_t columns;

  int choices() const { return tokens * top; }
};

enum class Kind { kAll, kOne, kOutside, kNone };

// Choices with the sizes, places and rows that they must get.
struct Problem {
  Problem(const Shape& shape, Kind kind, int offset, uint32_t seed) : s(shape), offset(offset) {
    std::mt19937 random(seed);
    const int origin = std::abs(offset) < 100 ? offset : 0;
    for (int i = 0; i < s.choices(); ++i) expert.push_back(Choose(kind, origin, random));
    for (int64_t i = 0; i < s.tokens * s.columns; ++i) {
      x.push_back(static_cast<uint16_t>(random()));
    }
    Sort();
  }

  int32_t Choose(Kind kind, int origin, std::mt19937& random) const {
    const auto number = static_cast<int>(random() % (1u << 30));
    if (kind == Kind::kOne) return origin + s.experts / 2;
    if (kind == Kind::kNone) return number % 2 ? INT_MAX : INT_MIN;
    return kind == Kind::kAll ? origin + number % s.experts : origin - 3 + number % (s.experts + 6);
  }

  void Sort() {
    const int64_t e = s.experts, first = std::clamp<int64_t>(offset, -e, INT_MAX - e);
    sizes.assign(s.experts, 0);
    place.assign(s.choices(), -1);
    std::vector<std::vector<int>> of_expert(s.experts);
    for (int i = 0; i < s.choices(); ++i) {
      const int64_t local = expert[i] - first;
      if (expert[i] >= 0 && local >= 0 && local < e) of_expert[local].push_back(i);
    }
    for (int i = 0; i < s.experts; ++i) {
      sizes[i] = static_cast<int>(of_expert[i].size());
      for (int choice : of_expert[i]) {
        place[choice] = static_cast<int>(order.size());
        order.push_back(choice);
      }
    }
  }

  Shape s;
  int32_t offset;
  std::vector<int32_t> expert, sizes, place, order;
  std::vector<uint16_t> x;
};

// The buffers of a problem; x begins `shift` elements behind an aligned address.
struct Buffers {
  explicit Buffers(const Problem& p, int shift)
      : x(ToDevice(Shifted(p.x, shift))),
        expert(ToDevice(p.expert)),
        offset(ToDevice(std::vector<int32_t>{p.offset})),
        sizes(ToDevice(std::vector<int32_t>(p.s.experts, -7))),
        place(ToDevice(std::vector<int32_t>(p.s.choices(), -7))),
        rows(ToDevice(std::vector<uint16_t>(p.s.choices() * p.s.columns, 0xffff))),
        group{p.s.tokens, p.s.top, p.s.experts, p.s.columns, false} {
    group.x = static_cast<const uint16_t*>(x.data()) + shift;
    group.expert = static_cast<const int32_t*>(expert.data());
    group.offset = static_cast<const int32_t*>(offset.data());
    group.sizes = static_cast<int32_t*>(sizes.data());
    group.place = static_cast<int32_t*>(place.data());
    group.rows = rows.data();
  }

  static std::vector<uint16_t> Shifted(std::vector<uint16_t> values, int shift) {
    values.insert(values.begin(), shift, 0);
    return values;
  }

  DeviceBuffer x, expert, offset, sizes, place, rows;
  GroupChoices group;
};

bool IsGrouped(const Problem& p, const Buffers& b) {
  if (ToHost<int32_t>(b.sizes) != p.sizes || ToHost<int32_t>(b.place) != p.place) return false;
  const std::vector<uint16_t> rows = ToHost<uint16_t>(b.rows);
  for (size_t i = 0; i < p.order.size(); ++i) {
    const auto from = p.x.begin() + p.order[i] / p.s.top * p.s.columns;
    if (!std::equal(from, from + p.s.columns, rows.begin() + i * p.s.columns)) return false;
  }
  // Rows of other choices are not written.
  const auto behind = rows.begin() + static_cast<int64_t>(p.order.size()) * p.s.columns;
  return std::all_of(behind, rows.end(), [](uint16_t x) { return x == 0xffff; });
}

// Combines exact numbers by weights of type W, which are NaN for choices that are not local. `listed`: rows are in the
// order of choices; rows of choices that are not local are NaN.
template <typename W, typename Out>
bool Combines(const Problem& p, const Buffers& b, ElementType weight_type, ElementType out_type,
              bool listed) {
  const auto row_of = [&](int64_t choice) { return listed ? choice : p.place[choice]; };
  std::vector<float> rows;
  std::vector<W> weight;
  for (int64_t i = 0; i < p.s.choices() * p.s.columns; ++i) {
    rows.push_back(static_cast<float>(i * 7 % 17 - 8));
  }
  for (int64_t i = 0; listed && i < p.s.choices() * p.s.columns; ++i) {
    if (p.place[i / p.s.columns] < 0) rows[i] = NAN;
  }
  for (int i = 0; i < p.s.choices(); ++i) {
    weight.push_back(W(p.place[i] < 0 ? NAN : 0.25f * static_cast<float>(i % 5 - 1)));
  }
  const DeviceBuffer of_rows = ToDevice(rows), of_weight = ToDevice(weight);
  const DeviceBuffer out = ToDevice(std::vector<Out>(p.s.tokens * p.s.columns, Out(NAN)));
  CombineChoices combine = {weight_type, out_type, p.s.tokens, p.s.top, p.s.columns};
  combine.rows = static_cast<const float*>(of_rows.data());
  combine.place = listed ? nullptr : b.group.place;
  combine.experts = p.s.experts;
  combine.expert = b.group.expert;
  combine.offset = b.group.offset;
  combine.weight = of_weight.data();
  combine.out = out.data();
  Check(LaunchCombineChoices(combine, nullptr), "LaunchCombineChoices");
  const std::vector<Out> found = ToHost<Out>(out);
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t token = i / p.s.columns, column = i % p.s.columns;
    float sum = 0;
    for (int64_t choice = token * p.s.top; choice < (token + 1) * p.s.top; ++choice) {
      if (p.place[choice] < 0) continue;
      sum += float(weight[choice]) * rows[row_of(choice) * p.s.columns + column];
    }
    if (float(found[i]) != float(Out(sum))) return false;
  }
  return true;
}

bool IsCorrect(const Problem& p, int shift, int turn) {
  const Buffers b(p, shift);
  Check(LaunchGroupChoices(b.group, nullptr), "LaunchGroupChoices");
  if (!IsGrouped(p, b)) return false;
  const auto combines = [&](bool listed) {
    switch (turn % 3) {
      case 0:
        return Combines<float, float>(p, b, ElementType::kF32, ElementType::kF32, listed);
      case 1:
        return Combines<__nv_bfloat16, __nv_bfloat16>(p, b, ElementType::kBf16, ElementType::kBf16,
                                                      listed);
      default:
        return Combines<__half, __half>(p, b, ElementType::kF16, ElementType::kF16, listed);
    }
  };
  return combines(false) && combines(true);
}

float Time(const std::function<void(int call, cudaStream_t)>& enqueue) {
  const auto calls = [&](cudaStream_t stream) {
    for (int i = 0; i < kCalls; ++i) enqueue(i, stream);
  };
  return TimeReplays(calls, kWarmUps, kReplays) / kCalls;
}

}  // namespace

std::pair<int, int> CheckExperts(uint64_t stride) {
  int correct = 0, wrong = 0;
  uint64_t turn = 0;
  const Shape shapes[] = {{1, 1, 1, 8},      {1, 8, 128, 2048}, {3, 2, 8, 72},    {16, 4, 32, 2880},
                          {37, 9, 5, 202},   {64, 8, 512, 64},  {7, 3, 9, 9001},  {256, 8, 60, 136},
                          {683, 3, 60, 136}, {1500, 7, 33, 41}, {4096, 8, 128, 8}};
  for (const Shape& shape : shapes) {
    for (Kind kind : {Kind::kAll, Kind::kOne, Kind::kOutside, Kind::kNone}) {
      for (int offset : {0, 3, -2, INT_MAX, INT_MIN}) {
        if (turn++ % stride != 0) continue;
        const int shift = turn % 5 == 0 ? 1 : 0;
        const Problem problem(shape, kind, offset, static_cast<uint32_t>(turn));
        const bool ok = IsCorrect(problem, shift, static_cast<int>(turn));
        ++(ok ? correct : wrong);
        if (ok) continue;
        std::printf(
            "wrong: %d tokens, %d of %d experts, %d columns, kind %d, offset %d, shift %d\n",
            shape.tokens, shape.top, shape.experts, static_cast<int>(shape.columns),
            static_cast<int>(kind), offset, shift);
      }
    }
  }
  const auto [right, other] = CheckRoute(stride);
  return {correct + right, wrong + other};
}

void TimeExperts() {
  TimeRoute();
  const Shape shapes[] = {{1, 8, 128, 2048}, {1, 2, 8, 4096}, {1, 4, 128, 2880}};
  for (Shape shape : shapes) {
    for (int tokens : {1, 4, 16, 64, 256, 1024, 4096}) {
      shape.tokens = tokens;
      const Problem problem(shape, Kind::kAll, 0, 1);
      const Buffers b(problem, 0);
      const DeviceBuffer rows(shape.choices() * shape.columns * 4), weight(shape.choices() * 4);
      const DeviceBuffer out(tokens * shape.columns * 2);
      Check(cudaMemset(rows.data(), 0, rows.bytes()), "cudaMemset");
      Check(cudaMemset(weight.data(), 0, weight.bytes()), "cudaMemset");
      CombineChoices combine = {ElementType::kF32, ElementType::kBf16, tokens, shape.top,
                                shape.columns};
      combine.rows = static_cast<const float*>(rows.data());
      combine.place = b.group.place;
      combine.weight = weight.data();
      combine.out = out.data();
      const auto group = [&](int, cudaStream_t stream) {
        Check(LaunchGroupChoices(b.group, stream), "LaunchGroupChoices");
      };
      const auto combines = [&](int, cudaStream_t stream) {
        Check(LaunchCombineChoices(combine, stream), "LaunchCombineChoices");
      };
      const float of_group = Time(group), of_combine = Time(combines);
      const float of_both =
          Time([&](int call, cudaStream_t stream) { group(call, stream), combines(call, stream); });
      combine.place = nullptr;
      combine.experts = shape.experts;
      combine.expert = b.group.expert;
      const float of_listed = Time(combines);
      std::printf(
          "%5d tokens, %d of %3d experts, %4d columns: group %7.2f us, combine %7.2f us, in turn "
          "%7.2f us; combine a list %7.2f us\n",
          tokens, shape.top, shape.experts, static_cast<int>(shape.columns), of_group, of_combine,
          of_both, of_listed);
      std::fflush(stdout);
    }
  }
}

}  // namespace jaxlowbit::check
