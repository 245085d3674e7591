// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <iterator>
#include <tuple>

#include "cuda/check/placed_problem.h"
#include "cuda/device/pdl.cuh"
#include "cuda/kernels/launch_config.h"

namespace jaxlowbit::check {
namespace {

constexpr int64_t kGap = 256;  // bytes between buffers, for misalignment

__global__ void DelayedCopyKernel(const uint8_t* from, uint8_t* to, int64_t bytes) {
  LaunchDependents();
  for (int i = 0; i < 20; ++i) __nanosleep(1000);
  for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

}  // namespace

PlacedProblem::PlacedProblem(const QuantizedMatmul& p, const Buffers& original,
                             const Places& places)
    : buffers_(original), out_(OutExtent(p, original)), original_out_(original.out) {
  Buffers& b = buffers_;
  const Epilogue& e = p.epilogue;
  struct Operand {
    const void** data;
    int64_t element;  // bytes
  };
  const auto slot = [](auto& pointer) {
    return const_cast<const void**>(reinterpret_cast<void const* const*>(&pointer));
  };
  const Operand operands[] = {
      {slot(b.lhs), SizeOf(p.lhs)},     {slot(b.packed), 4},
      {slot(b.scale), p.scale_bytes()}, {slot(b.zero), p.zero_bytes()},
      {slot(b.permutation), 4},         {slot(b.index), 4},
      {slot(b.group_sizes), 4},         {slot(b.group_offset), 4},
      {slot(b.bias), SizeOf(e.bias)},   {slot(b.residual), SizeOf(e.residual)},
      {slot(b.lhs_scale), 4},           {slot(b.unit), 4}};
  const auto extents = OperandExtents(p, original);
  static_assert(std::size(operands) == kOut && std::tuple_size_v<decltype(extents)> == kOut);
  const auto is_odd = [&](size_t i) { return (places.odd >> i & 1) != 0; };
  const int64_t out_element = SizeOf(p.out);
  bool placed = false;
  for (size_t i = 0; i < extents.size(); ++i) {
    const Extent& extent = extents[i];
    if (extent.bytes == 0) continue;
    const int64_t offset = is_odd(i) ? operands[i].element * (2 * static_cast<int64_t>(i) + 1) : 0;
    const bool under = static_cast<int>(i) == places.under;
    memory_.emplace_back(extent.bytes + kGap + (under ? 2 * (out_.bytes + kGap) : 0));
    const int64_t before = under ? CeilDiv(out_.bytes, kGap) * kGap : 0;
    void* place = Offset(memory_.back().data(), before + offset);
    copies_.push_back({extent, place});
    *operands[i].data = place;
    if (!under) continue;
    placed = true;
    const int64_t bytes = places.shift == 0   ? -out_.bytes / 2
                          : places.shift == 1 ? 0
                                              : extent.bytes / 2;
    const auto address = reinterpret_cast<uintptr_t>(place) + bytes;
    b.out = reinterpret_cast<void*>(address / out_element * out_element);
  }
  if (!placed) {
    memory_.emplace_back(out_.bytes + kGap);
    b.out = Offset(memory_.back().data(), is_odd(kOut) ? 3 * out_element : 0);
  }
  out_.data = b.out;
}

void PlacedProblem::Restore() const {
  for (const DeviceBuffer& buffer : memory_) {
    Check(cudaMemset(buffer.data(), 0xff, buffer.bytes()), "cudaMemset");
  }
  for (const Copy& copy : copies_) {
    Check(cudaMemcpy(copy.to, copy.from.data, copy.from.bytes, cudaMemcpyDeviceToDevice),
          "cudaMemcpy");
  }
}

void PlacedProblem::CopyResult() const {
  Check(cudaMemcpy(original_out_, out_.data, out_.bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
}

void DelayedCopy(const Extent& from, void* to) {
  const LaunchConfig launch(1, 256, 0, nullptr);
  Check(
      cudaLaunchKernelEx(&launch.config, DelayedCopyKernel, static_cast<const uint8_t*>(from.data),
                         static_cast<uint8_t*>(to), from.bytes),
      "CopyLateKernel");
}

}  // namespace jaxlowbit::check
