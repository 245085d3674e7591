// SPDX-License-Identifier: Apache-2.0
//
// Launches attend (attend.h). The kernels are in attend.cuh and attend_splits.cuh.

#include <algorithm>
#include <atomic>
#include <limits>

#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/attend.cuh"
#include "cuda/ops/attend.h"
#include "cuda/ops/attend_splits.cuh"

namespace jaxlowbit {
namespace {

using attend::kCombineColumns;
using attend::kCombineThreads;
using attend::kMaxSplits;
using attend::kUnit;
using attend::Params;

static_assert(kMaxSplits == kMaxAttendSplits);

using KernelFunction = void (*)(Params);

// Bit mask of the devices that have loaded a kernel.
template <typename T, typename C, int kSize, bool kWide>
std::atomic<uint64_t> loaded_on{0};

// A kernel and how it is launched.
struct Variant {
  KernelFunction kernel;
  int warps, shared_bytes, ctas;
  std::atomic<uint64_t>* loaded;
};

template <typename T, typename C, int kSize, bool kWide>
Variant Of() {
  using S = attend::Shape<C, kSize>;
  return {attend::AttendKernel<T, C, kSize, kWide>, S::kWarps, S::kSharedBytes, S::kCtas,
          &loaded_on<T, C, kSize, kWide>};
}
template <typename T, typename C, int kSize>
Variant Of(bool wide) {
  return wide ? Of<T, C, kSize, true>() : Of<T, C, kSize, false>();
}
template <typename T, typename C>
Variant Of(int64_t size, bool wide) {
  return size <= 64 ? Of<T, C, 64>(wide) : size <= 128 ? Of<T, C, 128>(wide) : Of<T, C, 256>(wide);
}
template <typename T>
Variant Of(const Attend& attend) {
  const bool wide = attend.shared() > 8;
  switch (attend.cache) {
    case ElementType::kInt8:
      return Of<T, int8_t>(attend.head_size, wide);
    case ElementType::kE4m3:
      return Of<T, __nv_fp8_e4m3>(attend.head_size, wide);
    default:
      return Of<T, T>(attend.head_size, wide);
  }
}
Variant Find(const Attend& attend) {
  return attend.type == ElementType::kBf16 ? Of<__nv_bfloat16>(attend) : Of<__half>(attend);
}

int64_t PartialBytes(const Attend& attend) {  // of one split
  return attend.batch * attend.heads * (attend.head_size + 2) * int64_t{sizeof(float)};
}

template <typename T>
cudaError_t Combine(const Attend& attend, const Params& params, const Device& device,
                    cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(attend.batch * attend.heads),
                  static_cast<unsigned>(CeilDiv(attend.head_size, kCombineColumns)));
  const LaunchConfig launch(grid, kCombineThreads, 0, stream, device.compute_capability >= 90);
  const float* sums = params.sums;
  const float2* stats = params.stats;
  return cudaLaunchKernelEx(&launch.config, attend::CombineKernel<T>, sums, stats,
                            static_cast<T*>(params.out), params.splits, params.size);
}

// The time of one turn of `ctas` CTAs, relative to a single CTA; each warp processes kUnit slots per turn. If two CTAs
// fit on an SM, one saturates bandwidth; if three fit, two do not. Fitted to measurements: docs/kernels/attend.md.
double TurnOf(int64_t ctas, const Variant& variant, int num_sms) {
  constexpr double kOfThree[] = {0, 1, 1.2, 1.7};
  const int64_t most = CeilDiv(ctas, num_sms);
  if (variant.ctas > 2) return kOfThree[most];
  const double mean = static_cast<double>(ctas) / num_sms;
  return ctas == 0 ? 0 : std::max(1.0, mean + 0.2 * static_cast<double>(most));
}

}  // namespace

// Minimizes the time, in turns, of waves of as many CTAs as fit on the device at a time.
int AttendSplits(const Attend& attend, const Device& device, int64_t workspace_bytes) {
  if (attend.batch == 0) return 1;
  const Variant variant = Find(attend);
  const int fit = device.shared_bytes_per_sm / (variant.shared_bytes + kReservedSharedBytes);
  const int64_t wave = std::clamp(fit, 1, variant.ctas) * device.num_sms;
  const double start = variant.ctas > 2 ? 3 : 1.5, second_kernel = 1.5;
  const int64_t pairs = attend.batch * attend.kv_heads;
  const int64_t units = std::max<int64_t>(CeilDiv(attend.reach, kUnit), 1);
  const int64_t max_splits = std::min<int64_t>(
      {kMaxSplits, CeilDiv(units, variant.warps), workspace_bytes / PartialBytes(attend)});
  int64_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t splits = 1; splits <= std::max<int64_t>(max_splits, 1); ++splits) {
    const auto turns = static_cast<double>(CeilDiv(units, variant.warps * splits));
    const int64_t ctas = pairs * splits;
    const double waves = static_cast<double>(ctas / wave) * TurnOf(wave, variant, device.num_sms) +
                         TurnOf(ctas % wave, variant, device.num_sms);
    const double time = waves * (turns + start) + (splits > 1 ? second_kernel : 0);
    if (time < least) best = splits, least = time;
  }
  return static_cast<int>(best);
}

cudaError_t LoadAttend(const Attend& attend, const Device& device) {
  const Variant variant = Find(attend);
  const uint64_t bit = uint64_t{1} << device.ordinal % 64;
  if (variant.loaded->load(std::memory_order_acquire) & bit) return cudaSuccess;
  const auto* kernel = reinterpret_cast<const void*>(variant.kernel);
  const auto* combine = attend.type == ElementType::kBf16
                            ? reinterpret_cast<const void*>(attend::CombineKernel<__nv_bfloat16>)
                            : reinterpret_cast<const void*>(attend::CombineKernel<__half>);
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(device.ordinal);
  if (error == cudaSuccess) error = PreferSharedMemory(kernel);
  if (error == cudaSuccess) error = AllowSharedMemory(kernel, variant.shared_bytes);
  if (error == cudaSuccess) error = PreferSharedMemory(combine);
  const cudaError_t restored = cudaSetDevice(current);
  if (error == cudaSuccess) error = restored;
  if (error == cudaSuccess) variant.loaded->fetch_or(bit, std::memory_order_release);
  return error;
}

cudaError_t LaunchAttend(const Attend& attend, void* workspace, int64_t workspace_bytes,
                         const Device& device, cudaStream_t stream) {
  if (attend.batch == 0) return cudaSuccess;
  const int splits = AttendSplits(attend, device, workspace_bytes);
  const int64_t rows = attend.batch * attend.heads;
  Params params = {};
  params.query = attend.query, params.key = attend.key, params.value = attend.value;
  params.cos = attend.cos, params.sin = attend.sin;
  params.query_norm = attend.query_norm, params.key_norm = attend.key_norm;
  params.query_bias = attend.query_bias, params.key_bias = attend.key_bias;
  params.value_bias = attend.value_bias, params.sinks = attend.sinks;
  params.epsilon = attend.epsilon, params.neighbours = attend.neighbours;
  params.keys = attend.keys, params.values = attend.values, params.slot = attend.slot;
  params.key_scales = attend.key_scales, params.value_scales = attend.value_scales;
  params.position = attend.position, params.positions = attend.positions;
  params.out = attend.out;
  if (splits > 1) {
    params.sums = static_cast<float*>(workspace);
    params.stats = reinterpret_cast<float2*>(params.sums + rows * splits * attend.head_size);
  }
  params.kv_heads = static_cast<int>(attend.kv_heads);
  params.shared = static_cast<int>(attend.shared());
  params.size = static_cast<int>(attend.head_size);
  params.slots = static_cast<int>(attend.slots);
  params.reach = static_cast<int>(attend.reach);
  params.splits = splits;
  constexpr int64_t kMaxDistance = std::numeric_limits<int32_t>::max();
  params.max_distance = static_cast<uint32_t>(
      attend.window == 0 ? kMaxDistance : std::min(attend.window - 1, kMaxDistance));
  params.scale = attend.scale * attend::kLog2E;
  params.pdl = attend.pdl && device.compute_capability >= 90;
  params.holds_next = params.pdl && attend.holds_next;
  params.aligned = IsAligned(attend.keys) && IsAligned(attend.values);
  const Variant variant = Find(attend);
  const int64_t units = CeilDiv(attend.reach, kUnit), workers = splits * variant.warps;
  params.rounds = static_cast<int>(units / workers);
  params.odd_units = static_cast<int>(units % workers);
  const dim3 grid(static_cast<unsigned>(attend.kv_heads), static_cast<unsigned>(splits),
                  static_cast<unsigned>(attend.batch));
  const LaunchConfig launch(grid, 32 * variant.warps, variant.shared_bytes, stream, params.pdl);
  const cudaError_t error = cudaLaunchKernelEx(&launch.config, variant.kernel, params);
  if (error != cudaSuccess || splits == 1) return error;
  const auto combine = attend.type == ElementType::kBf16 ? Combine<__nv_bfloat16> : Combine<__half>;
  return combine(attend, params, device, stream);
}

}  // namespace jaxlowbit
