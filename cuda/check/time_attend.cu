// SPDX-License-Identifier: Apache-2.0

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/check/random.cuh"
#include "cuda/check/replay.h"
#include "cuda/check/time_attend.h"
#include "cuda/launch.h"
#include "cuda/ops/attend.h"

namespace jaxlowbit::check {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWorkspaceBytes = int64_t{16} << 20;
constexpr int64_t kL2Bytes = int64_t{60} << 20;  // H200, the largest in use
constexpr int kReplays = 50, kWarmUps = 30;

template <typename T>
__global__ void FillKernel(T* data, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    data[i] = T(Normal(i + (seed << 40)));
  }
}

__device__ bool IsVisible(const Attend& a, int64_t element, int64_t slot) {
  const int64_t held = a.positions[element * a.slots + slot];
  const int64_t distance = a.position[element] - held;
  return slot < a.reach && held >= 0 && distance >= 0 && (a.window == 0 || distance < a.window);
}

// Writes NaN to the keys and values of all masked slots, and of the slot to be written. One CTA per slot.
template <typename T>
__global__ void HideKernel(Attend a) {
  const int64_t row = blockIdx.x;
  if (IsVisible(a, row / a.slots, row % a.slots) && row % a.slots != *a.slot) return;
  for (int64_t i = threadIdx.x; i < a.kv_heads * a.head_size; i += kThreads) {
    static_cast<T*>(a.keys)[row * a.kv_heads * a.head_size + i] = T(NAN);
    static_cast<T*>(a.values)[row * a.kv_heads * a.head_size + i] = T(NAN);
  }
}

// x plus a bias, or null; bias and sum are rounded.
template <typename T>
__device__ T Biased(T x, const float* bias) {
  if (bias == nullptr) return x;
  return T(static_cast<float>(x) + static_cast<float>(T(*bias)));
}

// Adds biases to rows of `from` [batch, heads, head_size], rotates them and stores element i of head h of b at
// to[b * stride + h * head_size + i]. One thread per head. Cosines and sines are chosen so that rotation is exact.
template <typename T>
__global__ void RotateKernel(Attend a, const T* from, const float* bias, const float* norm,
                             int64_t heads, T* to, int64_t stride) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x, d = a.head_size;
  if (row >= a.batch * heads) return;
  const auto biased = [&](int64_t i) {
    return double{static_cast<float>(
        Biased(from[row * d + i], bias == nullptr ? nullptr : bias + row % heads * d + i))};
  };
  double squares = 0;
  for (int64_t i = 0; i < d; ++i) squares += biased(i) * biased(i);
  const double factor = 1 / sqrt(squares / static_cast<double>(d) + a.epsilon);
  const auto normalized = [&](int64_t i) {
    const double x = biased(i);
    return norm == nullptr
               ? x
               : double{static_cast<float>(T(static_cast<float>(x * factor * norm[i])))};
  };
  T* out = to + row / heads * stride + row % heads * d;
  for (int64_t pair = 0; pair < d / 2; ++pair) {
    const int64_t first = a.neighbours ? 2 * pair : pair;
    const int64_t second = a.neighbours ? 2 * pair + 1 : pair + d / 2;
    const double x = normalized(first), y = normalized(second);
    const double c = a.cos[row / heads * (d / 2) + pair], s = a.sin[row / heads * (d / 2) + pair];
    out[first] = T(static_cast<float>(x * c - y * s));
    out[second] = T(static_cast<float>(y * c + x * s));
  }
}

template <typename T>
__global__ void CopyRowsKernel(const T* from, const float* bias, int64_t columns, T* to,
                               int64_t stride) {
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    to[blockIdx.x * stride + i] =
        Biased(from[blockIdx.x * columns + i], bias == nullptr ? nullptr : bias + i);
  }
}

// The attention of rotated queries to a cache with the new keys, in double precision, and the error bound of a correct
// result. One CTA per head.
template <typename T>
__global__ void ReferenceKernel(Attend a, const T* rotated, double* scores, double* exact,
                                double* bound) {
  const int64_t row = blockIdx.x, element = row / a.heads, d = a.head_size;
  const int64_t kv_head = row % a.heads / (a.heads / a.kv_heads);
  const auto cache_row = [&](const void* cache, int64_t slot) {
    return static_cast<const T*>(cache) + ((element * a.slots + slot) * a.kv_heads + kv_head) * d;
  };
  __shared__ double shared[kThreads];
  const auto reduce = [&](double value, bool of_sum) {
    __syncthreads();
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int i = 0; i < kThreads; ++i) {
      if (i == 0) value = shared[0];
      value = i == 0 ? value : of_sum ? value + shared[i] : fmax(value, shared[i]);
    }
    return value;
  };
  double* own = scores + row * a.reach;
  // The error of a score: accumulation, which may truncate, scaling, and the power of two. One element of a normalized
  // query or key may be rounded to either side.
  const bool half = a.type == ElementType::kF16;
  const double u = half ? 0x1p-11 : 0x1p-8;  // the rounding of weights, and of the result
  double highest = -INFINITY, error = 0;
  for (int64_t slot = threadIdx.x; slot < a.reach; slot += kThreads) {
    own[slot] = -INFINITY;
    if (!IsVisible(a, element, slot)) continue;
    double dot = 0, magnitude = 0, largest = 0;
    for (int64_t i = 0; i < d; ++i) {
      const double product = double{static_cast<float>(rotated[row * d + i])} *
                             double{static_cast<float>(cache_row(a.keys, slot)[i])};
      dot += product;
      magnitude += fabs(product);
      largest = fmax(largest, fabs(product));
    }
    own[slot] = a.scale * dot;
    highest = fmax(highest, own[slot]);
    const double normalized = a.query_norm == nullptr ? 0 : 4 * u * largest;
    error =
        fmax(error,
             ((static_cast<double>(d) + 8) * 0x1p-23 * magnitude + normalized) * a.scale + 0x1p-20);
  }
  const double sink = a.sinks == nullptr ? -INFINITY : a.sinks[row % a.heads];
  highest = fmax(reduce(highest, false), sink);
  error = reduce(error, false);
  double total = 0;
  for (int64_t slot = threadIdx.x; slot < a.reach; slot += kThreads) {
    own[slot] = own[slot] == -INFINITY ? 0 : exp(own[slot] - highest);
    total += own[slot];
  }
  total = reduce(total, true) + (sink == -INFINITY ? 0 : exp(sink - highest));
  const double tiny = half ? 0x1p-24 : 0x1p-126;  // the error of subnormal weights
  for (int64_t i = threadIdx.x; i < d; i += kThreads) {
    double sum = 0, magnitude = 0, values = 0;
    for (int64_t slot = 0; slot < a.reach; ++slot) {
      if (!IsVisible(a, element, slot)) continue;
      const double value = static_cast<float>(cache_row(a.values, slot)[i]);
      sum += own[slot] * value;
      magnitude += own[slot] * fabs(value);
      values += fabs(value);
    }
    const double whole = total == 0 ? 0 : 1 / total;
    exact[row * d + i] = sum * whole;
    bound[row * d + i] =
        (u + 2 * error + (static_cast<double>(a.reach) + 64) * 0x1p-23) * magnitude * whole +
        tiny * values * whole + u * (1 + 0x1p-6) * fabs(sum * whole) + tiny;
  }
}

struct Shape {
  int64_t batch, heads, kv_heads, head_size, slots, reach;
};

// Options of a case.
struct Variation {
  int64_t window = 0;
  bool holes = false;       // some slots are empty, and some sequences begin later
  bool earlier = false;     // the query is not the last position
  bool masked = false;      // the query of the last sequence sees nothing
  int odd = 0;              // misalignment of buffers, in elements after a multiple of 16 bytes
  bool in_place = false;    // the result overwrites the query
  bool neighbours = false;  // pairs of the rotation
  bool norms = false;
  bool biases = false, sinks = false;
  int64_t slot = -1;  // the slot to write; -1 for the last in use, -2 for none
};

// Random operands on the device.
template <typename T>
class Problem {
 public:
  Problem(const Shape& s, const Variation& v, int64_t used, uint64_t seed)
      : query_(Bytes(s.batch * s.heads * s.head_size)),
        key_(Bytes(s.batch * s.kv_heads * s.head_size)),
        value_(Bytes(s.batch * s.kv_heads * s.head_size)),
        keys_(Bytes(s.batch * s.slots * s.kv_heads * s.head_size)),
        values_(Bytes(s.batch * s.slots * s.kv_heads * s.head_size)),
        floats_(Floats(s) * 4),
        positions_((s.batch * (s.slots + 1) + 1) * 4),
        out_(Bytes(s.batch * s.heads * s.head_size)) {
    a_.type = std::is_same_v<T, __half> ? ElementType::kF16 : ElementType::kBf16;
    a_.batch = s.batch, a_.heads = s.heads, a_.kv_heads = s.kv_heads, a_.head_size = s.head_size;
    a_.slots = s.slots, a_.reach = s.reach, a_.window = v.window;
    a_.scale = 1 / std::sqrt(static_cast<float>(s.head_size));
    a_.neighbours = v.neighbours;
    a_.epsilon = 1e-5f;
    a_.query = static_cast<T*>(query_.data()) + v.odd;
    a_.key = static_cast<T*>(key_.data()) + v.odd;
    a_.value = static_cast<T*>(value_.data()) + v.odd;
    a_.keys = static_cast<T*>(keys_.data()) + v.odd;
    a_.values = static_cast<T*>(values_.data()) + v.odd;
    a_.out = v.in_place ? const_cast<void*>(a_.query) : static_cast<T*>(out_.data()) + v.odd;
    const auto* floats = static_cast<const float*>(floats_.data());
    a_.cos = floats;
    a_.sin = floats + s.batch * (s.head_size / 2);
    if (v.norms) a_.query_norm = floats + s.batch * s.head_size;
    if (v.norms) a_.key_norm = floats + (s.batch + 1) * s.head_size;
    const float* addends = floats + (s.batch + 2) * s.head_size;
    if (v.biases) {
      a_.query_bias = addends;
      a_.key_bias = a_.query_bias + s.heads * s.head_size;
      a_.value_bias = a_.key_bias + s.kv_heads * s.head_size;
    }
    if (v.sinks) a_.sinks = addends + (s.heads + 2 * s.kv_heads) * s.head_size;
    auto* positions = static_cast<int32_t*>(positions_.data());
    a_.position = positions;
    a_.positions = positions + s.batch;
    a_.slot = positions + s.batch * (s.slots + 1);
    slot_ = v.slot == -2 ? s.slots : v.slot == -1 ? used - 1 : v.slot;
    FillPositions(s, v, used, seed);
    Fill(seed);
  }

  const Attend& attend() const { return a_; }
  int64_t outputs() const { return a_.batch * a_.heads * a_.head_size; }
  bool writes() const { return slot_ < a_.slots; }

  void Fill(uint64_t seed) const {
    const int64_t row = a_.batch * a_.kv_heads * a_.head_size;
    Random(a_.query, outputs(), 5 * seed);
    Random(a_.keys, a_.slots * row, 5 * seed + 1);
    Random(a_.values, a_.slots * row, 5 * seed + 2);
    Random(a_.key, row, 5 * seed + 3);
    Random(a_.value, row, 5 * seed + 4);
  }

  void Hide() const {
    HideKernel<T><<<a_.batch * a_.slots, kThreads>>>(a_);
    Check(cudaGetLastError(), "HideKernel");
  }

  // Rotates queries, and appends to the cache.
  void Append(T* rotated) const {
    const int64_t columns = a_.kv_heads * a_.head_size, stride = a_.slots * columns;
    const auto rotate = [&](const void* from, const float* bias, const float* norm, int64_t heads,
                            T* to, int64_t stride) {
      const auto ctas = static_cast<unsigned>((a_.batch * heads + kThreads - 1) / kThreads);
      RotateKernel<<<ctas, kThreads>>>(a_, static_cast<const T*>(from), bias, norm, heads, to,
                                       stride);
    };
    rotate(a_.query, a_.query_bias, a_.query_norm, a_.heads, rotated, a_.heads * a_.head_size);
    if (writes()) {
      rotate(a_.key, a_.key_bias, a_.key_norm, a_.kv_heads,
             static_cast<T*>(a_.keys) + slot_ * columns, stride);
      CopyRowsKernel<<<a_.batch, kThreads>>>(static_cast<const T*>(a_.value), a_.value_bias,
                                             columns, static_cast<T*>(a_.values) + slot_ * columns,
                                             stride);
    }
    Check(cudaGetLastError(), "appending");
  }

  std::vector<T> Result() const { return Host(a_.out, outputs()); }

  // Keys, and then values, of the slot that is written.
  std::vector<T> Written() const {
    std::vector<T> rows;
    const int64_t columns = a_.kv_heads * a_.head_size;
    for (const void* cache : {a_.keys, a_.values}) {
      for (int64_t b = 0; writes() && b < a_.batch; ++b) {
        const auto row =
            Host(static_cast<const T*>(cache) + (b * a_.slots + slot_) * columns, columns);
        rows.insert(rows.end(), row.begin(), row.end());
      }
    }
    return rows;
  }

 private:
  static int64_t Bytes(int64_t elements) { return (elements + 16) * int64_t{sizeof(T)}; }

  // The number of cosines and sines, norms, biases and sinks.
  static int64_t Floats(const Shape& s) {
    return (s.batch + 2 + s.heads + 2 * s.kv_heads) * s.head_size + s.heads;
  }

  static std::vector<T> Host(const void* data, int64_t count) {
    std::vector<T> host(count);
    Check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "kernel");
    return host;
  }

  static void Random(const void* data, int64_t count, uint64_t seed) {
    const auto ctas = static_cast<unsigned>(std::clamp<int64_t>(count / kThreads, 1, 4096));
    FillKernel<<<ctas, kThreads>>>(static_cast<T*>(const_cast<void*>(data)), count, seed);
    Check(cudaGetLastError(), "FillKernel");
  }

  void FillPositions(const Shape& s, const Variation& v, int64_t used, uint64_t seed) const {
    std::vector<int32_t> host(s.batch * (s.slots + 1) + 1);
    for (int64_t b = 0; b < s.batch; ++b) {
      const int64_t padding = v.holes ? std::min<int64_t>(b % 3 * 5, used - 1) : 0;
      host[b] = static_cast<int32_t>(used - 1 - padding);
      if (v.earlier) host[b] = host[b] / 2;
      if (v.masked && b == s.batch - 1) host[b] = -1;
      for (int64_t slot = 0; slot < s.slots; ++slot) {
        const bool hole = slot >= used || slot < padding ||
                          (v.holes && slot + 1 < used && Hash(slot + (seed << 32)) % 7 == 0);
        host[s.batch + b * s.slots + slot] = hole ? -1 : static_cast<int32_t>(slot - padding);
      }
    }
    host.back() = static_cast<int32_t>(slot_);
    Check(cudaMemcpy(positions_.data(), host.data(), host.size() * 4, cudaMemcpyHostToDevice),
          "cudaMemcpy");
    // Multiples of 1/4 make products and their sums exact. Biases and sinks, from -4 to 4, are rounded.
    std::vector<float> floats(Floats(s));
    const auto exact = static_cast<size_t>((s.batch + 2) * s.head_size);
    for (size_t i = 0; i < floats.size(); ++i) {
      const uint64_t number = Hash(i + (seed << 32));
      floats[i] = i < exact ? static_cast<float>(static_cast<int>(number % 9) - 4) / 4
                            : static_cast<float>(static_cast<int>(number % 8001) - 4000) / 1000;
    }
    Check(cudaMemcpy(floats_.data(), floats.data(), floats.size() * 4, cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }

  DeviceBuffer query_, key_, value_, keys_, values_, floats_, positions_, out_;
  int64_t slot_;
  Attend a_;
};

// The largest error of a result as a fraction of the bound; NaN counts as infinite.
template <typename T>
double ErrorOverBound(const std::vector<T>& found, const std::vector<double>& exact,
                      const std::vector<double>& bound) {
  double worst = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double ratio = std::fabs(double{static_cast<float>(found[i])} - exact[i]) / bound[i];
    if (!(ratio <= worst)) worst = std::isnan(ratio) ? INFINITY : ratio;
  }
  return worst;
}

// Whether the appended keys and values are exact, except for the rounding of normalized elements.
template <typename T>
bool IsAppended(const std::vector<T>& found, const std::vector<T>& wanted, bool norms) {
  const double u = std::is_same_v<T, __half> ? 0x1p-10 : 0x1p-7;
  for (size_t i = 0; i < found.size(); ++i) {
    const double got = static_cast<float>(found[i]), want = static_cast<float>(wanted[i]);
    // A rotation adds two elements, and each may be rounded to the other side.
    if (!(std::fabs(got - want) <= (norms ? u * (2 * std::fabs(want) + 8) : 0))) return false;
  }
  return true;
}

// Whether the kernel is within the bound, and repeats bit for bit.
template <typename T>
bool IsCorrect(const Shape& s, const Variation& v, int64_t workspace_bytes, uint64_t seed) {
  const Problem<T> problem(s, v, s.reach, seed);
  const Attend& a = problem.attend();
  Check(LoadAttend(a, DeviceInfo(0)), "LoadAttend");
  problem.Hide();
  const int64_t count = problem.outputs();
  const DeviceBuffer scores(a.batch * a.heads * a.reach * 8), exact(count * 8), bound(count * 8);
  const DeviceBuffer workspace(workspace_bytes), rotated(count * int64_t{sizeof(T)});
  problem.Append(static_cast<T*>(rotated.data()));
  ReferenceKernel<T><<<a.batch * a.heads, kThreads>>>(
      a, static_cast<const T*>(rotated.data()), static_cast<double*>(scores.data()),
      static_cast<double*>(exact.data()), static_cast<double*>(bound.data()));
  Check(cudaGetLastError(), "ReferenceKernel");
  const std::vector<T> wanted = problem.Written();
  std::vector<double> exact_host(count), bound_host(count);
  Check(cudaMemcpy(exact_host.data(), exact.data(), count * 8, cudaMemcpyDeviceToHost),
        "reference");
  Check(cudaMemcpy(bound_host.data(), bound.data(), count * 8, cudaMemcpyDeviceToHost),
        "reference");

  std::vector<T> first;
  const char* wrong = nullptr;
  double ratio = 0;
  for (int run = 0; run < 2 && wrong == nullptr; ++run) {
    Check(cudaMemset(workspace.data(), 0xff, workspace.bytes()), "cudaMemset");  // NaN
    problem.Fill(seed);
    problem.Hide();
    if (!v.in_place) Check(cudaMemset(a.out, 0xff, count * sizeof(T)), "cudaMemset");
    Check(LaunchAttend(a, workspace.data(), workspace_bytes, DeviceInfo(0), nullptr),
          "LaunchAttend");
    const std::vector<T> found = problem.Result();
    if (run == 0) {
      first = found;
      ratio = ErrorOverBound(found, exact_host, bound_host);
      if (!(ratio <= 1)) wrong = "beyond the bound";
      if (!IsAppended(problem.Written(), wanted, v.norms)) wrong = "not appended";
    } else if (std::memcmp(first.data(), found.data(), count * sizeof(T)) != 0) {
      wrong = "two runs differ";
    }
  }
  if (wrong == nullptr) return true;
  std::printf(
      "WRONG  attend %s batch=%d heads=%d/%d head_size=%d reach=%d of %d window=%d holes=%d "
      "earlier=%d blind=%d odd=%d in_place=%d neighbours=%d norms=%d biases=%d sinks=%d slot=%d "
      "splits=%d: %s, error over bound %.3g\n",
      a.type == ElementType::kF16 ? "f16" : "bf16", static_cast<int>(a.batch),
      static_cast<int>(a.heads), static_cast<int>(a.kv_heads), static_cast<int>(a.head_size),
      static_cast<int>(a.reach), static_cast<int>(a.slots), static_cast<int>(a.window), v.holes,
      v.earlier, v.masked, v.odd, v.in_place, v.neighbours, v.norms, v.biases, v.sinks,
      static_cast<int>(v.slot), AttendSplits(a, DeviceInfo(0), workspace_bytes), wrong, ratio);
  return false;
}

// Microseconds per call: the median of replays of a graph with all calls.
float Time(const std::vector<Attend>& calls, void* workspace, int64_t workspace_bytes) {
  const auto enqueue = [&](cudaStream_t stream) {
    for (const Attend& call : calls) {
      Check(LaunchAttend(call, workspace, workspace_bytes, DeviceInfo(0), stream), "LaunchAttend");
    }
  };
  return TimeReplays(enqueue, kWarmUps, kReplays) / static_cast<float>(calls.size());
}

// `int8`: the cache has 8 bits; its elements are the bytes of random floats, and all scales are equal.
void TimeShape(const Shape& s, int64_t used, const Variation& v = {}, bool int8 = false) {
  const int64_t rows = s.batch * s.slots * s.kv_heads, scale_bytes = int8 ? rows * 4 : 0;
  const int64_t bytes = (int8 ? 2 : 4) * s.batch * s.reach * s.kv_heads * s.head_size;
  const int64_t copies = std::clamp<int64_t>(8 * kL2Bytes / bytes, 2, 256);
  std::vector<std::unique_ptr<Problem<__nv_bfloat16>>> data;
  std::vector<Attend> calls;
  const DeviceBuffer scales(std::max<int64_t>(copies * 2 * scale_bytes, 4));
  Check(cudaMemset(scales.data(), 0x3c, copies * 2 * scale_bytes), "cudaMemset");
  for (int64_t i = 0; i < copies; ++i) {
    data.push_back(std::make_unique<Problem<__nv_bfloat16>>(s, v, used, i));
    calls.push_back(data.back()->attend());
    if (!int8) continue;
    Attend& call = calls.back();
    call.cache = ElementType::kInt8;
    call.key_scales = static_cast<float*>(scales.data()) + 2 * i * rows;
    call.value_scales = call.key_scales + rows;
  }
  while (calls.size() < 16) calls.push_back(calls[calls.size() - copies]);
  Check(LoadAttend(calls[0], DeviceInfo(0)), "LoadAttend");
  const DeviceBuffer workspace(kWorkspaceBytes);
  const double read = static_cast<double>(bytes) * static_cast<double>(used) / s.reach;
  // Times the chosen number of splits and half of it.
  const int chosen = AttendSplits(calls[0], DeviceInfo(0), kWorkspaceBytes);
  for (int max_splits : {chosen, chosen / 2}) {
    if (max_splits == 0) continue;
    const int64_t workspace_bytes = 4 * max_splits * s.batch * s.heads * (s.head_size + 2);
    const float us = Time(calls, workspace.data(), workspace_bytes);
    std::printf(
        "attend batch %-3d heads %d/%d x %d  reach %-6d used %-6d splits %-3d %8.2f us  "
        "%5.2f TB/s%s%s%s\n",
        static_cast<int>(s.batch), static_cast<int>(s.heads), static_cast<int>(s.kv_heads),
        static_cast<int>(s.head_size), static_cast<int>(s.reach), static_cast<int>(used),
        AttendSplits(calls[0], DeviceInfo(0), workspace_bytes), us, 1e-6 * read / us,
        v.biases ? "  biases" : "", v.sinks ? "  sinks" : "", int8 ? "  int8" : "");
  }
  std::fflush(stdout);
}

}  // namespace

std::pair<int, int> CheckAttend(uint64_t stride) {
  int correct = 0, wrong = 0;
  uint64_t turn = 0;
  const auto check = [&](Shape shape) {
    Variation v;
    const int64_t windows[] = {0, 0, 1, 100, 5000};
    v.window = windows[turn % 5];
    v.holes = turn % 3 != 0;
    v.earlier = turn % 7 == 3;
    v.masked = turn % 11 == 5;
    v.odd = turn % 13 == 6 ? 1 + static_cast<int>(turn % 2) : 0;
    v.in_place = turn % 17 == 8;
    v.neighbours = turn % 2 == 1;
    v.norms = turn % 4 >= 2;
    v.biases = turn % 8 % 3 == 1;
    v.sinks = turn % 7 >= 4;
    v.slot = turn % 23 == 9 ? -2 : turn % 5 == 2 ? shape.reach / 2 : -1;
    shape.slots = shape.reach + (turn % 2 == 0 ? 0 : turn % 4 == 1 ? 3 : 64);
    // Workspace for all splits, for few, or for none.
    const int64_t workspace = turn % 19 == 9 ? 16
                              : turn % 19 == 10
                                  ? 3 * 4 * shape.batch * shape.heads * (shape.head_size + 2)
                                  : kWorkspaceBytes;
    if (turn++ % stride != 0) return;
    for (const bool half : {false, true}) {
      const bool ok = half ? IsCorrect<__half>(shape, v, workspace, turn)
                           : IsCorrect<__nv_bfloat16>(shape, v, workspace, turn);
      ++(ok ? correct : wrong);
    }
  };
  const std::pair<int64_t, int64_t> heads[] = {{8, 8}, {32, 8}, {9, 3}, {16, 1}};
  for (int64_t head_size : {64, 128, 256}) {
    for (auto [of_query, of_key] : heads) {
      for (int64_t batch : {1, 2, 5, 16}) {
        for (int64_t reach : {1, 7, 256, 1000, 1024, 4096}) {
          check({batch, of_query, of_key, head_size, reach, reach});
        }
      }
    }
  }
  for (int64_t head_size : {8, 40, 80, 96, 160, 248}) {
    for (int64_t reach : {33, 1000}) check({3, 12, 4, head_size, reach, reach});
  }
  check({1, 32, 8, 128, 20000, 20000});  // more than one read of positions, and more than 32 splits
  check({40, 32, 8, 128, 1000, 1000});   // more CTAs than fit at a time
  return {correct, wrong};
}

void TimeAttend() {
  for (int64_t batch : {1, 4, 16}) {
    for (int64_t reach : {256, 1024, 4096, 8192, 16384}) {
      for (const bool int8 : {false, true}) {
        TimeShape({batch, 32, 8, 128, reach, reach}, reach, {}, int8);
      }
    }
    TimeShape({batch, 32, 8, 128, 16384, 16384}, 1000);  // most of the cache is not in use yet
  }
  Variation added;
  added.biases = added.sinks = true;
  for (int64_t batch : {1, 16}) {  // of gpt-oss
    for (int64_t reach : {256, 4096}) {
      for (const Variation& v : {Variation{}, added}) {
        TimeShape({batch, 64, 8, 64, reach, reach}, reach, v);
      }
    }
    for (const bool int8 : {false, true}) {
      TimeShape({batch, 64, 8, 64, 8192, 8192}, 8192, {}, int8);
      TimeShape({batch, 16, 8, 256, 8192, 8192}, 8192, {}, int8);
    }
  }
}

}  // namespace jaxlowbit::check
