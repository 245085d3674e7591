// SPDX-License-Identifier: Apache-2.0
//
// Alignment and overlap of the pointers of a call. A plan is made without pointers, for buffers at addresses that are known at
// launch. It may ask `Ways` about alignment and overlap, and every answer is recorded: the plan is valid for all pointers
// with the same answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/extents.h"

namespace jaxlowbit {

// A buffer of a call, by its number among the call's pointers, and an offset in it.
struct Address {
  int buffer = -1;  // -1: null
  int64_t offset = 0;

  bool operator==(std::nullptr_t) const { return buffer < 0; }
  bool operator!=(std::nullptr_t) const { return buffer >= 0; }
  bool operator==(const Address& other) const {
    return buffer == other.buffer && offset == other.offset;
  }
};

inline Address Offset(const Address& address, int64_t bytes) {
  return address == nullptr ? address : Address{address.buffer, address.offset + bytes};
}

using AddressExtent = BasicExtent<Address>;

inline AddressExtent MakeExtent(const Address& data, int64_t bytes) { return {data, bytes}; }

template <typename T>
using AddressOf = Address;
using Addresses = BasicBuffers<AddressOf>;

// The buffers at addresses, which are fields of the same names.
Buffers BuffersAt(const Addresses& addresses, void* const* pointers);

// One product of a call, before its pointers are known.
struct PlannedProduct {
  QuantizedMatmul problem;
  Addresses buffers;
};

struct Question {
  enum class Kind {
    kAligned,  // a, to kAlignment
    kSame,     // a and b
    kOverlap   // a and b
  } kind;
  AddressExtent a, b;
  bool answer = false;
};

class Ways {
 public:
  // `pointers`: of the call's buffers; null: typical ones, which are aligned and do not overlap.
  explicit Ways(void* const* pointers) : pointers_(pointers) {}

  bool IsAligned(const Address& address);
  // `typical`: the answer for typical pointers.
  bool IsSame(const Address& a, const Address& b, bool typical = false);
  bool Overlap(const AddressExtent& a, const AddressExtent& b);

  const std::vector<Question>& questions() const { return questions_; }

 private:
  // `question` has the answer for typical pointers.
  bool Ask(const Question& question);

  void* const* pointers_;
  std::vector<Question> questions_;
};

// Whether these pointers give the recorded answers.
bool HaveSameWays(const std::vector<Question>& questions, void* const* pointers);

}  // namespace jaxlowbit
