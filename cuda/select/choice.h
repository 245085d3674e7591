// SPDX-License-Identifier: Apache-2.0
//
// A choice of kernel, tile and split, and the result type of support checks.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <string>

namespace jaxlowbit {

// Result of a support check: true, or false with the reason.
struct Support {
  std::string reason;

  explicit operator bool() const { return reason.empty(); }
};

// The custom call that measures choices encodes this order: append new kernels.
enum class Kernel { kQmmSm80, kQmmSm90Stream, kQmmSm90 };

inline constexpr const char* kKernelNames[] = {"qmm_sm80", "qmm_sm90_stream", "qmm_sm90"};
inline constexpr int kNumKernels = static_cast<int>(std::size(kKernelNames));

inline const char* NameOf(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }

// Each kernel reads the fields that its Choices sets (kernels/*/select.cc); the others keep their defaults.
struct Choice {
  Kernel kernel = Kernel::kQmmSm80;
  int block_m = 0;  // rows of lhs per tile
  // Number of slices of k: of split-K, of a qmm_sm90_stream cluster, or of qmm_sm90's stream-K tail.
  int split_k = 1;
  int slices = 0;  // slices of 16 channels per cluster of qmm_sm90_stream
  int tile = 0;    // index of qmm_sm90's tile shape
  int peers = 1;   // CTAs per cluster of qmm_sm90, which share lhs by multicast
  // The choice comes from a table of measurements (tuned.h), not from the cost model.
  bool tuned = false;
};

// A choice as numbers, for attributes of custom calls and tables of measurements. Saved tables use this order and the
// Python names of the fields (kernel, block_m, split_k, slices, tile, peers).
inline constexpr int kChoiceNumbers = 6;
using ChoiceNumbers = std::array<int64_t, kChoiceNumbers>;

inline ChoiceNumbers NumbersOf(const Choice& choice) {
  return {static_cast<int>(choice.kernel),
          choice.block_m,
          choice.split_k,
          choice.slices,
          choice.tile,
          choice.peers};
}

inline Choice ChoiceOf(const ChoiceNumbers& numbers) {
  Choice choice;
  choice.kernel = static_cast<Kernel>(numbers[0]);
  choice.block_m = static_cast<int>(numbers[1]);
  choice.split_k = static_cast<int>(numbers[2]);
  choice.slices = static_cast<int>(numbers[3]);
  choice.tile = static_cast<int>(numbers[4]);
  choice.peers = static_cast<int>(numbers[5]);
  return choice;
}

}  // namespace jaxlowbit
