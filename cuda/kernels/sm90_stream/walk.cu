// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

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

// Vectors of a half of a row that the consumers can normalize (Instance::kVectors).
int NormalizedVectors(int groups, int rows) {
  return 256 * groups * (groups == 1 && rows == 1 ? 4 : 2);
}

bool Supports(const WalkShape& shape, const WalkOptions& options) {
  if (options.groups < 1 || options.groups > 2 || shape.rows < 1 || shape.rows > 2) return false;
  if (shape.layers < 1 || options.flight < 1 || options.epoch < 2) return false;
  if (shape.qkv < shape.width || shape.width / 8 > NormalizedVectors(options.groups, shape.rows)) {
    return false;
  }
  for (int step = 0; step < kWalkSteps; ++step) {
    const int page_k = 2 * 8 * 64 * options.groups;  // pages of both CTAs for every group of warps
    if (shape.k(step) % page_k != 0 || shape.n(step) % 64 != 0) return false;
  }
  return true;
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

void SetShape(const WalkShape& shape, const WalkBuffers& buffers, const WalkOptions& options,
              Params* p) {
  const auto counts = reinterpret_cast<uint64_t*>(buffers.counts);
  const auto units_of = [&](int step) {
    return WalkUnitsOf(shape.n(step) / 64, p->clusters, MayCut(shape, step, options.groups));
  };
  for (int step = 0; step < kWalkSteps; ++step) {
    walk::Product& own = p->products[step];
    const int before = (step + kWalkSteps - 1) % kWalkSteps, strips = shape.n(step) / 64;
    const int64_t elements = int64_t{shape.n(step)} * shape.weights(step) * shape.k(step);
    own.packed = static_cast<const uint8_t*>(buffers.packed[step]);
    own.scales = static_cast<const uint8_t*>(buffers.scales[step]);
    own.packed_stride = elements / 2;
    own.scale_stride = elements / 128 * 2;
    if (step == kWalkGateUp || step == kWalkQkv) {
      own.norm = static_cast<const uint8_t*>(buffers.norms[step == kWalkQkv]);
      own.norm_stride = int64_t{shape.width} * 2;
    }
    own.lhs = buffers.results[before];
    own.lhs_row = shape.n(before) / 2;
    own.lhs_epoch = step == kWalkOut ? -1 : 0;
    own.lhs_count = counts + before;
    const WalkUnits units = units_of(before);
    own.lhs_arrivals = 2 * (units.base * p->clusters + units.extra);
    if (step == kWalkOut) own.residual = buffers.results[kWalkDown], own.residual_epoch = -1;
    if (step == kWalkDown) own.residual = buffers.results[kWalkOut];
    own.out = buffers.results[step];
    own.count = counts + step;
    own.trace = static_cast<walk::T*>(buffers.trace[step]);
    own.out_row = shape.n(step) / 2;
    own.atoms = shape.k(step) / 128;
    own.second = step == kWalkGateUp ? strips : 0;
    own.units = units_of(step);
  }
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
  error = AllowSharedMemory(function, SharedBytes(p));
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
  p.epoch = options.epoch;
  p.patience = static_cast<uint32_t>(options.patience);
  p.error = buffers.error;
  p.stamps = buffers.stamps;
  SetShape(shape, buffers, options, &p);
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

}  // namespace jaxlowbit::sm90_stream
