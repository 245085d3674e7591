// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cuda_walk.h"

#include <atomic>

#include "cuda/kernels/sm90_stream/walk.h"
#include "cuda/kernels/sm90_stream/walk_select.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

using sm90_stream::kWalkProducts;
using sm90_stream::PrefersWalk;
using sm90_stream::SupportsWalk;
using sm90_stream::WalkGrid;
using sm90_stream::WalkLayer;
using sm90_stream::WalkOptions;
using sm90_stream::WalkProducts;
using sm90_stream::WalkShape;
using sm90_stream::WalkShapeOf;

static_assert(WalkLayer::kWeights == kWalkProducts);

std::atomic<int64_t> walk_count{0};

// The buffers of a walk, as places, addresses or pointers.
template <typename Buffer>
struct WalkPlaces {
  Buffer packed[kWalkProducts], scales[kWalkProducts], norms[2];
  Buffer attended, residual, total, results[3];
};

// Calls visit(a, b) for every buffer of two.
template <typename From, typename To, typename Visit>
void VisitWalk(const WalkPlaces<From>& from, WalkPlaces<To>* to, const Visit& visit) {
  for (size_t i = 0; i < kWalkProducts; ++i) {
    to->packed[i] = visit(from.packed[i]);
    to->scales[i] = visit(from.scales[i]);
  }
  for (int i = 0; i < 2; ++i) to->norms[i] = visit(from.norms[i]);
  to->attended = visit(from.attended);
  to->residual = visit(from.residual);
  to->total = visit(from.total);
  for (int i = 0; i < 3; ++i) to->results[i] = visit(from.results[i]);
}

WalkPlaces<int64_t> PlacesOf(const Call& call) {
  WalkPlaces<int64_t> places = {};
  for (size_t i = 0; i < kWalkProducts; ++i) {
    places.packed[i] = call.products[i].places.packed;
    places.scales[i] = call.products[i].places.scale;
  }
  const Step &first = call.steps[2], &second = call.steps[5];
  places.norms[0] = first.scales, places.norms[1] = second.scales;
  places.attended = call.products[0].places.lhs;
  places.residual = first.x;
  places.total = second.total;
  for (int i = 0; i < 3; ++i) places.results[i] = call.products[3 + i].places.out;
  return places;
}

WalkProducts ProductsOf(const Call& call) {
  WalkProducts products;
  for (const Operands& product : call.operands) products.push_back(product.problem);
  return products;
}

// Whether the steps are attention, products and normalizations as add_block appends them.
bool HasKinds(const Call& call) {
  constexpr StepKind kKinds[kWalkCallSteps] = {
      StepKind::kAttend,   StepKind::kMultiply,  StepKind::kNormalize, StepKind::kMultiply,
      StepKind::kMultiply, StepKind::kNormalize, StepKind::kMultiply};
  constexpr int64_t kFirst[kWalkCallSteps] = {0, 0, 0, 1, 2, 0, 3};
  if (call.steps.size() != kWalkCallSteps || call.products.size() != kWalkProducts) return false;
  for (size_t i = 0; i < kWalkCallSteps; ++i) {
    const Step& step = call.steps[i];
    if (step.kind != kKinds[i]) return false;
    const int64_t count = i + 1 == kWalkCallSteps ? 3 : 1;
    if (step.kind == StepKind::kMultiply && (step.first != kFirst[i] || step.count != count)) {
      return false;
    }
  }
  return true;
}

// Whether each step reads what the one before has written, and products have no other operands.
bool Chains(const Call& call) {
  const auto& products = call.products;
  const Step &first = call.steps[2], &second = call.steps[5];
  for (const Product& product : products) {
    const Places& at = product.places;
    for (int64_t place : {at.zero, at.unit, at.index, at.group_sizes, at.group_offset,
                          at.permutation, at.bias, at.residual, at.lhs_scale, at.gathered}) {
      if (place != 0) return false;
    }
  }
  for (size_t i = 3; i < kWalkProducts; ++i) {
    if (products[i].places.lhs != second.out) return false;
  }
  for (const Step* step : {&first, &second}) {
    if (step->scales == 0 || step->addend == 0 || step->out_scale != 0) return false;
    if (call.At(step->x).element_type() != ffi::DataType::BF16) return false;
  }
  return first.addend == products[0].places.out && products[1].places.lhs == first.out &&
         products[2].places.lhs == products[1].places.out && second.x == first.total &&
         second.addend == products[2].places.out;
}

// Sets the region of a walk to zero, unless an earlier layer of the execution has.
class ClearStep final : public LoadedStep {
 public:
  ClearStep(const Address& region, int64_t bytes) : region_(region), bytes_(bytes) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    return sm90_stream::ClearWalkRegion(PointerTo(region_, pointers), bytes_, stream);
  }

  cudaError_t RunAmong(WalkState* state, void* const* pointers,
                       cudaStream_t stream) const override {
    const void* region = PointerTo(region_, pointers);
    if (state->region == region && state->bytes == bytes_) return cudaSuccess;
    *state = {region, bytes_, 0};
    return Run(pointers, stream);
  }

 private:
  const Address region_;
  const int64_t bytes_;
};

class WalkLayerStep final : public LoadedStep {
 public:
  WalkLayerStep(const WalkShape& shape, const WalkOptions& options, const WalkGrid& grid,
                const WalkLayer& layer, const WalkPlaces<Address>& at, const Address& region)
      : shape_(shape), options_(options), grid_(grid), layer_(layer), at_(at), region_(region) {}

  cudaError_t Run(void* const*, cudaStream_t) const override { return cudaErrorNotSupported; }

  cudaError_t RunAmong(WalkState* state, void* const* pointers,
                       cudaStream_t stream) const override {
    WalkPlaces<void*> own;
    VisitWalk(at_, &own, [&](const Address& address) { return PointerTo(address, pointers); });
    WalkLayer layer = layer_;
    for (size_t i = 0; i < kWalkProducts; ++i) {
      layer.packed[i] = own.packed[i];
      layer.scales[i] = own.scales[i];
    }
    for (int i = 0; i < 2; ++i) layer.norms[i] = own.norms[i];
    layer.attended = own.attended;
    layer.residual = own.residual;
    layer.total = own.total;
    layer.q = own.results[0], layer.k = own.results[1], layer.v = own.results[2];
    layer.region = PointerTo(region_, pointers);
    walk_count.fetch_add(1, std::memory_order_relaxed);
    return LaunchWalkLayer(shape_, layer, options_, grid_, state->layers++, stream);
  }

 private:
  const WalkShape shape_;
  const WalkOptions options_;
  const WalkGrid grid_;
  const WalkLayer layer_;  // without pointers
  const WalkPlaces<Address> at_;
  const Address region_;
};

WalkPlaces<Address> AddressesOf(const Call& call, const AddressOfPlace& at) {
  WalkPlaces<Address> addresses;
  VisitWalk(PlacesOf(call), &addresses, at);
  return addresses;
}

// How long CTAs may wait for each other. They start together, so a longer wait means that some never started.
constexpr int kPatienceMs = 20'000;

}  // namespace

int64_t FindWalk(const Call& call, const Device& device) {
  const sm90_stream::WalkMode mode = sm90_stream::CurrentWalkMode();
  if (mode == sm90_stream::WalkMode::kNever || !HasKinds(call) || !Chains(call)) return 0;
  const WalkProducts products = ProductsOf(call);
  if (!SupportsWalk(products, device)) return 0;
  if (mode == sm90_stream::WalkMode::kAuto && !PrefersWalk(products)) return 0;
  return WalkRegionBytes(WalkShapeOf(products));
}

bool CanWalk(const Call& call, const AddressOfPlace& at, const Address& region, Ways* ways) {
  bool aligned = ways->IsAligned(region);
  WalkPlaces<bool> ignored;
  VisitWalk(AddressesOf(call, at), &ignored, [&](const Address& address) {
    aligned = aligned && ways->IsAligned(address);
    return aligned;
  });
  return aligned;
}

cudaError_t LoadWalk(const Call& call, const AddressOfPlace& at, const Address& region,
                     float epsilon, std::unique_ptr<const LoadedStep>* clear,
                     std::unique_ptr<const LoadedStep>* walk) {
  const WalkShape shape = WalkShapeOf(ProductsOf(call));
  WalkOptions options;
  options.groups = WalkGroups(shape);
  options.patience = kPatienceMs;
  options.epsilon = epsilon;
  WalkGrid grid;
  const cudaError_t error = FindWalkGrid(shape, options, false, &grid);
  if (error == cudaErrorCooperativeLaunchTooLarge) return cudaErrorNotSupported;
  if (error != cudaSuccess) return error;
  const WalkPlaces<int64_t> places = PlacesOf(call);
  WalkLayer layer = {};
  for (int i = 0; i < 3; ++i) {
    layer.columns[i] = static_cast<int>(call.operands[3 + i].problem.n);
  }
  for (int i = 0; i < 2; ++i) {
    layer.wide_norms[i] = call.At(places.norms[i]).element_type() == ffi::DataType::F32;
  }
  *clear = std::make_unique<ClearStep>(region, WalkRegionBytes(shape));
  *walk =
      std::make_unique<WalkLayerStep>(shape, options, grid, layer, AddressesOf(call, at), region);
  return cudaSuccess;
}

int64_t CudaWalkCount() { return walk_count.load(std::memory_order_relaxed); }

}  // namespace jaxlowbit
