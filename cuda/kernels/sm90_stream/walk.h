// SPDX-License-Identifier: Apache-2.0
//
// walk: one launch for the products and normalizations between two attentions of a decode step, as custom calls use it, or
// for those of all layers of a decoder, which only the driver times (docs/kernels/decode.md).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/sm90_stream/walk_shape.h"

namespace jaxlowbit::sm90_stream {

// Two bfloat16 (low half) and the epoch that wrote them (high half): data that are their own flag.
using WalkEntry = uint64_t;

inline constexpr int kWalkStamps = 16;  // per CTA and step
// Of a consumer thread in the order of time, then of the collector.
enum WalkStamp {
  kStampStart,       // the step begins: polls of entries begin
  kStampSeen,        // this thread's entries are there
  kStampSquares,     // sums of squares are there, or rows of the step before are no longer read
  kStampThere,       // all rows are in shared memory
  kStampPage,        // the first page is there
  kStampFirst,       // the first page is multiplied
  kStampUnit,        // the first unit is multiplied
  kStampSent,        // and sent
  kStampMultiplied,  // the last page is multiplied
  kStampDone,        // the last unit is sent
  kStampExpected,    // the collector waits for the last unit
  kStampPartials,    // whose sums are there
  kStampStored,      // and stored
  kNumWalkStamps
};

// Device memory. Results of a step are [rows][n / 2] entries.
struct WalkBuffers {
  const void* packed[kWalkSteps];  // [layers][weights][strips][k blocks] atoms of 4 bits
  const void* scales[kWalkSteps];  // [layers][weights][strips][k / 128][64] bfloat16
  const void* norms[2];            // [layers][width] bfloat16: before gate and up, before q, k, v
  WalkEntry* results[kWalkSteps];  // of kWalkDown: x; x and q, k, v also begin the walk
  unsigned long long* counts;      // [kWalkSteps]: zero at first, never reset
  unsigned long long* error;       // zero unless a wait ended
  void* trace[kWalkSteps];         // null, or every layer's results, [layers][rows][n] bfloat16
  unsigned long long* stamps;      // null, or [CTAs][layers * kWalkSteps + 2][kWalkStamps]
};

struct WalkOptions {
  int groups = 2;  // of 8 consumer warps: 1 or 2
  int pages = 16;  // of the ring, at most
  int flight = 4;  // pages in flight at most
  // Of the results of the step before, how many may be missing by a counter when entries are polled; -1: no counter is
  // read first; -2: instead each warp first polls one entry.
  int slack = -1;
  int sleep = 0;            // nanoseconds between polls of data
  bool loads = true;        // false: weights stay in shared memory
  bool waits = true;        // false: activations are not waited for
  bool cooperative = true;  // false: the caller knows that all CTAs are resident
  int patience = 2000;      // milliseconds
  uint32_t epoch = 2;       // of the first layer; what begins the walk has the epoch before
  float epsilon = 1e-5f;    // of the normalizations
};

// The units of a step, which clusters take: strips of 64 channels (pairs of strips of gate and up), the rest
// as whole strips or as halves.
struct WalkUnits {
  int base;   // whole units of every cluster
  int extra;  // clusters that have one more, a half of a unit if cut
  bool cut;
};
constexpr WalkUnits WalkUnitsOf(int strips, int clusters, bool may_cut) {
  const int base = strips / clusters, rest = strips % clusters;
  const bool cut = may_cut && 2 * rest <= clusters;
  return {base, cut ? 2 * rest : rest, cut};
}

// The grid of the current device, or an error. Shapes: k of each CTA's half in pages, see docs/kernels/decode.md.
struct WalkGrid {
  int clusters, pages, shared_bytes, registers;
};
cudaError_t FindWalkGrid(const WalkShape& shape, const WalkOptions& options, bool stamps,
                         WalkGrid* grid);

// `grid`: of the same shape and options, with stamps if the buffers have some.
cudaError_t LaunchWalk(const WalkShape& shape, const WalkBuffers& buffers,
                       const WalkOptions& options, const WalkGrid& grid, cudaStream_t stream);

// --- one layer between two attentions -------------------------------------------------------------

// Device memory of a layer. Rows are bfloat16; buffers begin at multiples of 16 bytes.
struct WalkLayer {
  // Of o, of gate and up, of down, of q, of k and of v.
  static constexpr int kWeights = kWalkSteps + 2;
  const void *packed[kWeights], *scales[kWeights];
  int columns[3];  // of q, k and v; together shape.qkv
  const void* norms[2];
  bool wide_norms[2];               // float32
  const void *attended, *residual;  // [rows][shape.k(kWalkOut)] and [rows][width]
  void *total, *q, *k, *v;          // the new residual, and rows of WalkLayer::columns
  void* region;                     // WalkRegionBytes, which ClearWalkRegion has set to zero
};

// Memory that consecutive layers of the same shape share.
int64_t WalkRegionBytes(const WalkShape& shape);

// Enqueues the start of consecutive layers.
cudaError_t ClearWalkRegion(void* region, int64_t bytes, cudaStream_t stream);

// Enqueues layer `number` since ClearWalkRegion, counted from 0, under PDL. Before the kernels in front of it have ended,
// it reads only weights. Shape: of one layer. `grid`: of the same shape and options. If CTAs wait for each other for longer
// than options.patience, the kernel ends with an error of its context.
cudaError_t LaunchWalkLayer(const WalkShape& shape, const WalkLayer& layer,
                            const WalkOptions& options, const WalkGrid& grid, int number,
                            cudaStream_t stream);

}  // namespace jaxlowbit::sm90_stream
