// SPDX-License-Identifier: Apache-2.0
//
// Choices as Python knows them: kernels by name, and all of it in numbers where an attribute has to
// hold them.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/dispatch.h"

namespace jaxlowbit {

// By number, the order of enum class Kernel.
inline constexpr const char* kKernelNames[] = {"qmm_sm80", "qmm_sm90_stream", "qmm_sm90"};

inline const char* NameOf(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }

// The number of a kernel, or -1.
inline int KernelNumber(const std::string& name) {
  for (int number = 0; number < static_cast<int>(std::size(kKernelNames)); ++number) {
    if (name == kKernelNames[number]) return number;
  }
  return -1;
}

inline Choice ChoiceOf(int64_t kernel, int64_t block_m, int64_t split_k, int64_t slices,
                       int64_t tile, int64_t mates) {
  Choice choice;
  choice.kernel = static_cast<Kernel>(kernel);
  choice.block_m = static_cast<int>(block_m);
  choice.split_k = static_cast<int>(split_k);
  choice.slices = static_cast<int>(slices);
  choice.tile = static_cast<int>(tile);
  choice.mates = static_cast<int>(mates);
  return choice;
}

// How many numbers an attribute has of a choice: the arguments of ChoiceOf.
inline constexpr int kChoiceNumbers = 6;

inline std::vector<Choice> DecodeChoices(const int64_t* begin, const int64_t* end) {
  std::vector<Choice> choices;
  for (; end - begin >= kChoiceNumbers; begin += kChoiceNumbers) {
    choices.push_back(ChoiceOf(begin[0], begin[1], begin[2], begin[3], begin[4], begin[5]));
  }
  return choices;
}

}  // namespace jaxlowbit
