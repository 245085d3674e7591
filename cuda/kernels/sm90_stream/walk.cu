// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <climits>

#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/kernels/sm90_stream/walk.cuh"
#include "cuda/kernels/sm90_stream/walk.h"

namespace jaxlowbit::sm90_stream {
namespace {

using walk::Params;
using Function = void (*)(Params);

template <int kGroups>
Function FindFunction(int rows, bool stamps) {
  if (rows == 1) {
    return stamps ? walk::WalkKernel<walk::Instance<kGroups, 1, true>>
                  : walk::WalkKernel<walk::Instance<kGroups, 1, false>>;
  }
  return stamps ? walk::WalkKernel<walk::Instance<kGroups, 2, true>>
                : walk::WalkKernel<walk::Instance<kGroups, 2, false>>;
}

Function FindFunction(int groups, int rows, bool stamps) {
  return groups == 1 ? FindFunction<1>(rows, stamps) : FindFunction<2>(rows, stamps);
}

int Threads(int groups) { return 32 * (8 * groups + walk::kHelperWarps); }

bool Supports(const WalkShape& shape, const WalkOptions& options) {
  if (options.flight < 1 || options.epoch < 2) return false;
  if (shape.attended == 0 && shape.qkv < shape.width) return false;
  return *UnsupportedWalk(shape, options.groups) == '\0';
}

// Whether half strips have whole pages for every group of warps.
bool MayCut(const WalkShape& shape, int step, int groups) {
  return shape.k(step) % (2 * 16 * 64 * groups) == 0;
}

// Layout of shared memory.
void PlaceAll(const WalkShape& shape, const WalkOptions& options, int limit, Params* p) {
  int atoms = 0;
  for (int step = 0; step < kWalkSteps; ++step) atoms = std::max(atoms, shape.k(step) / 128);
  p->lhs_at = walk::kBarrierArea;
  p->partials_at = p->lhs_at + atoms * shape.rows * walk::kLhsBytes;
  p->ring_at = p->partials_at + 2 * 2 * walk::kPartBytes;
  p->pages = std::min({options.pages, walk::kMaxPages, (limit - p->ring_at) / walk::kPageBytes});
  p->flight = std::min(options.flight, p->pages);
}

int SharedBytes(const Params& p) { return p.ring_at + p.pages * walk::kPageBytes; }

constexpr walk::Part kNoPart = {nullptr, nullptr, nullptr, INT_MAX, 0};

// What depends only on the shape.
void SetSizes(const WalkShape& shape, const WalkOptions& options, Params* p) {
  const auto units_of = [&](int step) {
    return WalkUnitsOf(shape.n(step) / 64, p->clusters, MayCut(shape, step, options.groups));
  };
  for (int step = 0; step < kWalkSteps; ++step) {
    walk::Product& own = p->products[step];
    const int before = (step + kWalkSteps - 1) % kWalkSteps, strips = shape.n(step) / 64;
    const int64_t elements = int64_t{shape.n(step)} * shape.weights(step) * shape.k(step);
    own.parts[0].row = shape.n(step) / 2;
    own.parts[1] = own.parts[2] = kNoPart;
    own.packed_stride = elements / 2;
    own.scale_stride = elements / 128 * 2;
    own.norm_stride = int64_t{shape.width} * 2;
    own.lhs_row = shape.n(before) / 2;
    own.lhs_epoch = step == kWalkOut ? -1 : 0;
    const WalkUnits units = units_of(before);
    own.lhs_arrivals = 2 * (units.base * p->clusters + units.extra);
    own.residual_epoch = step == kWalkOut ? -1 : 0;
    own.out_row = shape.n(step) / 2;
    own.atoms = shape.k(step) / 128;
    own.second = step == kWalkGateUp ? strips : 0;
    own.units = units_of(step);
  }
}

void SetBuffers(const WalkBuffers& buffers, Params* p) {
  const auto counts = reinterpret_cast<uint64_t*>(buffers.counts);
  for (int step = 0; step < kWalkSteps; ++step) {
    walk::Product& own = p->products[step];
    const int before = (step + kWalkSteps - 1) % kWalkSteps;
    own.parts[0].packed = static_cast<const uint8_t*>(buffers.packed[step]);
    own.parts[0].scales = static_cast<const uint8_t*>(buffers.scales[step]);
    own.parts[0].out = static_cast<walk::T*>(buffers.trace[step]);
    own.lhs = buffers.results[before];
    own.lhs_count = counts + before;
    own.out = buffers.results[step];
    own.count = counts + step;
  }
  p->products[kWalkGateUp].norm = static_cast<const uint8_t*>(buffers.norms[0]);
  p->products[kWalkQkv].norm = static_cast<const uint8_t*>(buffers.norms[1]);
  p->products[kWalkOut].residual = buffers.results[kWalkDown];
  p->products[kWalkDown].residual = buffers.results[kWalkOut];
}

// Entries of a step's results in the region of a layer, which begins with counts.
constexpr int64_t kCountBytes = 128;
int64_t EntryBytes(const WalkShape& shape, int step) {
  return step == kWalkQkv ? 0
                          : int64_t{shape.rows} * shape.n(step) / 2 * int64_t{sizeof(WalkEntry)};
}

void SetEntries(const WalkShape& shape, void* region, Params* p) {
  auto* const counts = static_cast<uint64_t*>(region);
  char* entries = static_cast<char*>(region) + kCountBytes;
  for (int step = kWalkOut; step < kWalkQkv; ++step) {
    walk::Product &own = p->products[step], &next = p->products[step + 1];
    own.out = reinterpret_cast<WalkEntry*>(entries);
    own.count = counts + step;
    next.lhs = own.out;
    next.lhs_count = own.count;
    entries += EntryBytes(shape, step);
  }
  p->products[kWalkDown].residual = p->products[kWalkOut].out;
}

void SetLayer(const WalkLayer& layer, Params* p) {
  walk::Product* const products = p->products;
  int first = 0;
  for (int i = 0; i < WalkLayer::kWeights; ++i) {
    const int step = std::min<int>(i, kWalkQkv), number = i - step;
    walk::Part& part = products[step].parts[number];
    part.packed = static_cast<const uint8_t*>(layer.packed[i]);
    part.scales = static_cast<const uint8_t*>(layer.scales[i]);
    if (step != kWalkQkv) continue;
    part.first = first;
    part.row = layer.columns[number] / 2;
    first += layer.columns[number] / 64;
  }
  products[kWalkDown].parts[0].out = static_cast<walk::T*>(layer.total);
  products[kWalkQkv].parts[0].out = static_cast<walk::T*>(layer.q);
  products[kWalkQkv].parts[1].out = static_cast<walk::T*>(layer.k);
  products[kWalkQkv].parts[2].out = static_cast<walk::T*>(layer.v);
  for (int i = 0; i < 2; ++i) {
    walk::Product& own = products[i == 0 ? kWalkGateUp : kWalkQkv];
    own.norm = static_cast<const uint8_t*>(layer.norms[i]);
    own.wide_norm = layer.wide_norms[i];
  }
  products[kWalkOut].plain_lhs = static_cast<const walk::T*>(layer.attended);
  products[kWalkOut].plain_residual = static_cast<const uint32_t*>(layer.residual);
}

// What all launches have in common.
Params ParamsOf(const WalkShape& shape, const WalkOptions& options, const WalkGrid& grid) {
  Params p = {};
  PlaceAll(shape, options, grid.shared_bytes, &p);
  p.layers = shape.layers;
  p.clusters = grid.clusters;
  p.turn = 17 % grid.clusters;
  p.mean_factor = 1.0f / static_cast<float>(shape.width);
  p.slack = options.slack;
  p.sleep = options.sleep;
  p.loads = options.loads;
  p.waits = options.waits;
  p.epsilon = options.epsilon;
  p.epoch = options.epoch;
  p.patience = static_cast<uint32_t>(options.patience);
  SetSizes(shape, options, &p);
  return p;
}

constexpr int kClearThreads = 256;

__global__ void ClearKernel(uint4* data, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{kClearThreads} + threadIdx.x;
  if (i < count) data[i] = {0, 0, 0, 0};
}

}  // namespace

cudaError_t FindWalkGrid(const WalkShape& shape, const WalkOptions& options, bool stamps,
                         WalkGrid* grid) {
  if (!Supports(shape, options)) return cudaErrorNotSupported;
  int device = 0, limit = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  Params p = {};
  PlaceAll(shape, options, limit, &p);
  if (p.pages < 2) return cudaErrorNotSupported;
  const auto function =
      reinterpret_cast<const void*>(FindFunction(options.groups, shape.rows, stamps));
  error = AllowSharedMemory(function, limit);  // other shapes may need more
  if (error == cudaSuccess) error = Load(reinterpret_cast<const void*>(ClearKernel));
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, function);
  if (error != cudaSuccess) return error;
  const LaunchConfig config(sms / 2 * 2, Threads(options.groups), SharedBytes(p), nullptr, false,
                            2);
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, function, &config.config);
  if (error != cudaSuccess) return error;
  if (clusters < 1) return cudaErrorCooperativeLaunchTooLarge;
  *grid = {std::min(clusters, sms / 2), p.pages, SharedBytes(p), attributes.numRegs};
  return cudaSuccess;
}

cudaError_t LaunchWalk(const WalkShape& shape, const WalkBuffers& buffers,
                       const WalkOptions& options, const WalkGrid& grid, cudaStream_t stream) {
  const bool stamps = buffers.stamps != nullptr;
  Params p = ParamsOf(shape, options, grid);
  p.error = buffers.error;
  p.stamps = buffers.stamps;
  SetBuffers(buffers, &p);
  LaunchConfig config(grid.clusters * 2, Threads(options.groups), grid.shared_bytes, stream, false,
                      2);
  cudaLaunchAttribute attributes[2] = {config.attributes[0], {}};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  config.config.attrs = attributes;
  config.config.numAttrs = options.cooperative ? 2 : 1;
  return LaunchFunction(
      config, reinterpret_cast<const void*>(FindFunction(options.groups, shape.rows, stamps)), &p);
}

int64_t WalkRegionBytes(const WalkShape& shape) {
  int64_t bytes = kCountBytes;
  for (int step = 0; step < kWalkSteps; ++step) bytes += EntryBytes(shape, step);
  return bytes;
}

cudaError_t ClearWalkRegion(void* region, int64_t bytes, cudaStream_t stream) {
  const int64_t count = bytes / int64_t{sizeof(uint4)};
  const LaunchConfig config(CeilDiv(count, kClearThreads), kClearThreads, 0, stream);
  return cudaLaunchKernelEx(&config.config, ClearKernel, static_cast<uint4*>(region), count);
}

cudaError_t LaunchWalkLayer(const WalkShape& shape, const WalkLayer& layer,
                            const WalkOptions& options, const WalkGrid& grid, int number,
                            cudaStream_t stream) {
  Params p = ParamsOf(shape, options, grid);
  p.epoch += number;
  SetEntries(shape, layer.region, &p);
  SetLayer(layer, &p);
  const LaunchConfig config(grid.clusters * 2, Threads(options.groups), grid.shared_bytes, stream,
                            true, 2);
  return LaunchFunction(
      config, reinterpret_cast<const void*>(FindFunction(options.groups, shape.rows, false)), &p);
}

}  // namespace jaxlowbit::sm90_stream
