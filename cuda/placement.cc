// SPDX-License-Identifier: Apache-2.0

#include "cuda/placement.h"

#include <type_traits>

#include "cuda/ops/copy.h"

namespace jaxlowbit {
namespace {

int64_t PlaceBytes(int64_t bytes) { return CeilDiv(bytes, kPlaceAlignment) * kPlaceAlignment; }

bool IsRedirected(const Operands* products, size_t count, size_t i) {
  const Extent out = OutExtent(products[i].problem, products[i].buffers);
  for (size_t j = 0; j < count; ++j) {
    const auto& [problem, buffers] = products[j];
    if (j != i && Overlap(out, OutExtent(problem, buffers))) return true;
    for (const Extent& operand : OperandExtents(problem, buffers)) {
      if (Overlap(out, operand)) return true;
    }
  }
  return false;
}

}  // namespace

int64_t RedirectedBytes(const Operands* products, size_t count) {
  int64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!IsRedirected(products, count, i)) continue;
    bytes += PlaceBytes(OutExtent(products[i].problem, products[i].buffers).bytes);
  }
  return bytes;
}

void* Placement::Allocate(int64_t bytes) {
  const int64_t left = (bytes_ - bytes) / kPlaceAlignment * kPlaceAlignment;
  if (bytes > bytes_) return nullptr;
  bytes_ = left;
  return Offset(workspace_, left);
}

void Placement::Copy(const void* from, void* to, int64_t bytes) {
  if (copies_ && error_ == cudaSuccess) error_ = LaunchCopy(from, to, bytes, stream_);
}

void* Placement::Redirect(void* result, int64_t bytes) {
  void* place = Allocate(bytes);
  if (place != nullptr) results_.push_back({place, result, bytes});
  return place;
}

void Placement::RedirectResults(Operands* products, size_t count) {
  std::vector<size_t> redirected;
  for (size_t i = 0; i < count; ++i) {
    if (IsRedirected(products, count, i)) redirected.push_back(i);
  }
  for (size_t i : redirected) {
    auto& [problem, buffers] = products[i];
    void* place = Redirect(buffers.out, OutExtent(problem, buffers).bytes);
    if (place == nullptr)
      error_ = cudaErrorMemoryAllocation;  // RedirectedBytes gives the size in advance
    buffers.out = place;
  }
}

const void* Placement::Aligned(const Extent& operand) {
  if (IsAligned(operand.data)) return operand.data;
  void* place = Allocate(operand.bytes);
  if (place == nullptr) return nullptr;
  copied_ = true;
  Copy(operand.data, place, operand.bytes);
  return place;
}

void Placement::Align(Operands* product) {
  auto& [p, b] = *product;
  // Packed weights are too large to be copied for one product.
  bool aligned = IsAligned(b.packed);
  const auto align = [&](const Extent& operand, auto* data) {
    if (operand.bytes == 0 || operand.data == nullptr) return;  // null: only loads its kernel
    const void* place = aligned ? Aligned(operand) : operand.data;
    aligned &= place != nullptr;
    if (aligned) *data = static_cast<std::remove_reference_t<decltype(*data)>>(place);
  };
  align(ScaleExtent(p, b), &b.scale);
  align(ZeroExtent(p, b), &b.zero);
  p.weights_aligned = aligned;
  // With other row lengths, rows are unaligned even if lhs begins at an aligned address.
  aligned = p.lhs_columns() * SizeOf(p.lhs) % kAlignment == 0;
  align(LhsExtent(p, b), &b.lhs);
  align(PermutationExtent(p, b), &b.permutation);
  p.lhs_aligned = aligned;
}

cudaError_t Placement::Finish() {
  for (const Result& result : results_) Copy(result.from, result.to, result.bytes);
  results_.clear();
  return error_;
}

}  // namespace jaxlowbit
