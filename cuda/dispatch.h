// SPDX-License-Identifier: Apache-2.0
//
// Choosing a kernel: a pure function of the problem and a few numbers of the device. Runs, and is
// tested, without a GPU.
#pragma once

#include <string>

#include "cuda/problem.h"

namespace jaxlowbit {

// Most parts the sum over k is split into, and the most memory their partial sums take. Both are
// part of the contract with whoever allocates the workspace.
inline constexpr int kMaxSplitK = 16;
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{16} << 20;

// Longest row that is normalized between products.
inline constexpr int64_t kMaxRmsNormColumns = 16384;

struct Device {
  int compute_capability = 0;  // 10 * major + minor
  int num_sms = 0;
  int shared_bytes_per_sm = 0;
  // Clusters that run at a time, by CTAs on a multiprocessor (1, 2) and CTAs of a cluster (1, 2, 4).
  int clusters[3][5] = {};
};

enum class Kernel { kQmmSm80, kQmmSm90Stream, kQmmSm90 };

struct Choice {
  Kernel kernel = Kernel::kQmmSm80;
  int block_m = 0;  // tokens of a tile
  int split_k = 1;  // parts of the sum over k
  int slices = 0;   // of 16 channels, that a cluster of qmm_sm90_stream owns
  int tile = 0;     // of qmm_sm90's tile shapes
  int mates = 1;    // CTAs of a cluster of qmm_sm90 that share activations
  // From a table of measurements (tuned.h), not from the cost model.
  bool tuned = false;
};

// CTAs on a multiprocessor that a choice of qmm_sm90_stream divides shared memory for.
int StreamCtasPerSm(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

// Whether one launch of qmm_sm90_stream may compute both products: they have one lhs and no epilogue, differ in
// their weights and n only, and are aligned.
bool MayJoin(const Operands& a, const Operands& b);

// Such products as one: the channels of all of them, each weight in strips of its own.
QuantizedMatmul Join(const Operands* products, size_t count);

// Elements of the batch, and rows of one of them, that a launch takes at most: grids and positions in them are
// 32-bit numbers. A product of more is several launches.
struct LaunchLimits {
  int64_t batch, rows;
};
LaunchLimits LimitsOf(const QuantizedMatmul& problem);

// Whether the kernel of a choice gathers lhs by a problem's orders itself.
bool Gathers(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

// Bytes of partial sums that a product of so many rows and columns may have at most, of all weights that its rows
// are multiplied by. Tiles cover up to twice what rows and columns are, each.
constexpr int64_t MostSumsBytes(int64_t rows, int64_t columns) {
  const int64_t bytes =
      2 * int64_t{sizeof(float)} * kMaxSplitK * rows * CeilDiv(columns, kAtom) * kAtom;
  return bytes < kMaxWorkspaceBytes ? bytes : kMaxWorkspaceBytes;
}

class TunedTable;

// Why no kernel computes `problem` on `device`, or an empty string.
std::string Unsupported(const QuantizedMatmul& problem, const Device& device);

// The same for one kernel.
std::string Unsupported(Kernel kernel, const QuantizedMatmul& problem, const Device& device);

// The same for one choice, whose partial sums have `workspace_bytes`.
std::string Unsupported(const Choice& choice, const QuantizedMatmul& problem, const Device& device,
                        int64_t workspace_bytes);

// Microseconds that `choice`, which is supported, is expected to take.
double Cost(const QuantizedMatmul& problem, const Device& device, const Choice& choice);

// The choice of least cost for one kernel that supports `problem`.
Choice Configure(Kernel kernel, const QuantizedMatmul& problem, const Device& device,
                 int64_t workspace_bytes);

// Fills in how many clusters `device` runs, from its multiprocessors, where it cannot be asked.
void AssumeClusters(Device& device);

// What `tuned`, if given, has measured for `problem`, or else the choice of least cost. Requires that
// Unsupported returns "", that m, n, k and batch are positive, and that m and batch are within the limits.
Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
              const TunedTable* tuned = nullptr);

}  // namespace jaxlowbit
