// SPDX-License-Identifier: Apache-2.0
//
// A problem with overlapping or unaligned buffers, as XLA may pass them.
#pragma once

#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/extents.h"

namespace jaxlowbit::check {

// Operands by number, in the order of OperandExtents, and the result.
enum PlacedBuffer {
  kLhs,
  kPacked,
  kScale,
  kZero,
  kPermutation,
  kIndex,
  kGroupSizes,
  kGroupOffset,
  kBias,
  kResidual,
  kLhsScale,
  kChannelScale,
  kOut
};

// Bit i of `odd`: buffer number i begins at an odd element; all others begin at multiples of 16 bytes. Out overlaps
// operand `under`, or none if that is kOut. `shift` 0: half of out is before the operand; 1: both begin at the same
// address; 2: out begins in the middle of the operand.
struct Places {
  unsigned odd = 0;
  int under = kOut, shift = 1;

  static constexpr int kTurns = 2 * (kOut + 1) * 3;
  static Places Of(int turn) {
    return {turn % 2 == 0 ? 0u : ~0u, turn / 2 % (kOut + 1), turn / 2 / (kOut + 1) % 3};
  }
};

class PlacedProblem {
 public:
  PlacedProblem(const QuantizedMatmul& problem, const Buffers& original, const Places& places);

  const Buffers& buffers() const { return buffers_; }
  // Restores operands, and writes NaN patterns to out if it overlaps none.
  void Restore() const;
  // Copies the result to the buffer of `original`.
  void CopyResult() const;

 private:
  struct Copy {
    Extent from;
    void* to;
  };

  Buffers buffers_;
  Extent out_;
  void* original_out_;
  std::vector<DeviceBuffer> memory_;
  std::vector<Copy> copies_;
};

// Times products with overlapping or unaligned buffers and, for comparison, with aligned and separate buffers. Prints
// microseconds in a captured chain over cold weights.
void TimePlaced();

// Enqueues a kernel that lets the next kernel start and, a while later, copies `from` to `to`.
void DelayedCopy(const Extent& from, void* to);

}  // namespace jaxlowbit::check
