// SPDX-License-Identifier: Apache-2.0

#include "cuda/kernels/sm90_stream/walk_select.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>

namespace jaxlowbit::sm90_stream {
namespace {

// Bytes of a layer's packed weights from which on the walk is faster: in smaller layers hops count more than the stream
// that continues through them.
constexpr int64_t kMinWalkBytes = int64_t{32} << 20;

constexpr int64_t kGroup = 128;

const char* const kNames[kWalkProducts] = {"out", "gate_up", "down", "query", "key", "value"};

// What a product has that the walk lacks, or "".
std::string Lacks(const QuantizedMatmul& p, bool gated) {
  const Epilogue& epilogue = p.epilogue;
  if (p.bits != 4 || p.codebook != Codebook::kNone || p.zero != ZeroKind::kNone) {
    return "is not int4";
  }
  // One group covers a k of 128, but that is too small anyway.
  if (p.group_size != kGroup) return "has groups that are not 128";
  if (p.lhs != ElementType::kBf16 || p.scale != ElementType::kBf16 || p.out != ElementType::kBf16) {
    return "has activations or scales that are not bfloat16";
  }
  if (p.transposed || p.scale_accumulators || p.apply_lhs_scale || p.is_ragged() ||
      p.permuted_parts > 0 || epilogue.units > 0) {
    return "is not a plain product of a matrix";
  }
  if (epilogue.gated != gated || p.batch != 1 || p.num_weights != p.weights_per_element()) {
    return "has another number of weights";
  }
  if (epilogue.activation != (gated ? Activation::kSilu : Activation::kNone)) {
    return "has another activation";
  }
  return "";
}

// k and n that are consistent, and fit an int.
bool Chains(const WalkProducts& products) {
  const QuantizedMatmul &out = products[0], &gate_up = products[1], &down = products[2];
  const int64_t width = out.n, rows = out.m;
  if (gate_up.k != width || down.n != width || down.k != gate_up.n) return false;
  int64_t largest = out.k;
  for (const QuantizedMatmul& p : products) {
    if (p.m != rows) return false;
    largest = std::max({largest, p.n, p.k});
  }
  for (size_t i = 3; i < kWalkProducts; ++i) {
    if (products[i].k != width || products[i].n % kWalkStrip != 0) return false;
  }
  return largest < std::numeric_limits<int>::max() / 4;
}

std::atomic<WalkMode>& Mode() {
  static std::atomic<WalkMode> mode = [] {
    const char* wanted = std::getenv("JAXLOWBIT_WALK");
    if (wanted == nullptr || *wanted == '\0') return WalkMode::kAuto;
    return *wanted == '0' ? WalkMode::kNever : WalkMode::kAlways;
  }();
  return mode;
}

}  // namespace

Support SupportsWalk(const WalkProducts& products, const Device& device) {
  if (device.compute_capability != 90) return {"the walk runs on compute capability 9.0"};
  if (device.num_sms < 2) return {"the walk needs two multiprocessors"};
  if (products.size() != kWalkProducts) return {"the walk has six products"};
  for (size_t i = 0; i < kWalkProducts; ++i) {
    const std::string lacks = Lacks(products[i], i == 1);
    if (!lacks.empty()) return {std::string(kNames[i]) + " " + lacks};
  }
  if (!Chains(products)) return {"the products do not follow each other"};
  const WalkShape shape = WalkShapeOf(products);
  return {UnsupportedWalk(shape, WalkGroups(shape))};
}

WalkShape WalkShapeOf(const WalkProducts& products) {
  const auto size = [](int64_t number) { return static_cast<int>(number); };
  WalkShape shape = {size(products[0].n), 0, size(products[1].n), 1, size(products[0].m)};
  shape.attended = size(products[0].k);
  for (size_t i = 3; i < kWalkProducts; ++i) shape.qkv += size(products[i].n);
  return shape;
}

int WalkGroups(const WalkShape& shape) {
  return *UnsupportedWalk(shape, kMaxWalkGroups) == '\0' ? kMaxWalkGroups : 1;
}

bool PrefersWalk(const WalkProducts& products) {
  int64_t bytes = 0;
  for (const QuantizedMatmul& p : products) {
    bytes += p.strips() * p.k_blocks() * p.words_per_atom() * int64_t{sizeof(uint32_t)};
  }
  return bytes >= kMinWalkBytes;
}

WalkMode CurrentWalkMode() { return Mode().load(std::memory_order_relaxed); }

void SetWalkMode(WalkMode mode) { Mode().store(mode, std::memory_order_relaxed); }

}  // namespace jaxlowbit::sm90_stream
