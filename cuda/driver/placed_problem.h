// SPDX-License-Identifier: Apache-2.0
//
// The buffers of a problem where XLA might put them.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/driver/device_problem.h"
#include "cuda/extents.h"

namespace jaxlowbit::driver {

// Copies of a problem's operands that begin at odd elements, or at multiples of 16 bytes, and a result that lies over
// one of them, or over none. `turn` says which: kTurns are all that there are.
class PlacedProblem {
 public:
  static constexpr int kTurns = 2 * 9 * 3;

  PlacedProblem(const QuantizedMatmul& problem, const Buffers& original, int turn);

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

// Enqueues a kernel that lets the next one start and, a while later, copies `from` to `to`.
void CopyLate(const Extent& from, void* to);

}  // namespace jaxlowbit::driver
