// SPDX-License-Identifier: Apache-2.0
//
// The buffers of a problem where XLA might put them.
#pragma once

#include <vector>

#include "cuda/driver/device_problem.h"
#include "cuda/extents.h"

namespace jaxlowbit::driver {

// Operands by number, in the order of OperandExtents, and the result.
enum PlacedBuffer { kLhs, kPacked, kScale, kZero, kPermutation, kIndex, kBias, kResidual, kOut };

// What begins at an odd element, bit i for number i; all else at a multiple of 16 bytes. Out lies over operand
// `under`, or with kOut over none: half of it before the operand's first byte (`shift` 0), where the operand begins
// (1), or from its middle on (2).
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
  // Operands as they were; where out lies over none, NaN patterns.
  void Restore() const;
  // Copies the result to where `original` has it.
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

// Prints what a product takes where its buffers lie where XLA might put them, beside what it takes where all are
// aligned and apart: microseconds in a captured chain over cold weights.
void TimePlaced();

// Enqueues a kernel that lets the next one start and, a while later, copies `from` to `to`.
void CopyLate(const Extent& from, void* to);

}  // namespace jaxlowbit::driver
