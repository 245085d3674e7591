// SPDX-License-Identifier: Apache-2.0

#include "cuda/ways.h"

namespace jaxlowbit {
namespace {

bool IsEqual(const AddressExtent& a, const AddressExtent& b) {
  return a.data == b.data && a.bytes == b.bytes;
}

}  // namespace

bool HaveSameWays(const std::vector<Question>& questions, void* const* pointers) {
  for (const auto& [kind, a, b, answer] : questions) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(pointers[a.data.buffer]) + a.data.offset;
    if (kind == Question::Kind::kRemainder) {
      if (static_cast<int64_t>(first % kAlignment) != answer) return false;
      continue;
    }
    const uintptr_t second = reinterpret_cast<uintptr_t>(pointers[b.data.buffer]) + b.data.offset;
    const bool holds = kind == Question::Kind::kSame
                           ? first == second
                           : first < second + b.bytes && second < first + a.bytes;
    if (holds != (answer != 0)) return false;
  }
  return true;
}

Buffers BuffersAt(const Addresses& addresses, void* const* pointers) {
  Buffers buffers;
  buffers.codebook = addresses.codebook;
#define JAXLOWBIT_BUFFER(type, name)                                                   \
  if (addresses.name.buffer >= 0) {                                                    \
    char* const data = static_cast<char*>(pointers[addresses.name.buffer]);            \
    buffers.name = reinterpret_cast<type*>(data + addresses.name.offset);              \
  }
#include "cuda/buffers.def"
  return buffers;
}

int64_t Ways::Ask(const Question& question) {
  for (const Question& known : questions_) {
    if (known.kind == question.kind && IsEqual(known.a, question.a) &&
        IsEqual(known.b, question.b)) {
      return known.answer;
    }
  }
  Question asked = question;
  if (pointers_ != nullptr) {
    for (asked.answer = 0; !HaveSameWays({asked}, pointers_);) ++asked.answer;
  }
  questions_.push_back(asked);
  return asked.answer;
}

// Offsets are taken from the buffer's remainder, so that the parts of a product add no questions.
bool Ways::IsAligned(const Address& address) {
  if (address == nullptr) return true;
  const int64_t remainder = Ask({Question::Kind::kRemainder, {{address.buffer, 0}, 0}, {}});
  return (remainder + address.offset) % kAlignment == 0;
}

bool Ways::IsSame(const Address& a, const Address& b, bool typical) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr || a.buffer == b.buffer) return false;
  return Ask({Question::Kind::kSame, {a, 0}, {b, 0}, typical}) != 0;
}

bool Ways::Overlap(const AddressExtent& a, const AddressExtent& b) {
  if (a.bytes <= 0 || b.bytes <= 0 || a.data == nullptr || b.data == nullptr) return false;
  if (a.data.buffer == b.data.buffer) {
    return a.data.offset < b.data.offset + b.bytes && b.data.offset < a.data.offset + a.bytes;
  }
  return Ask({Question::Kind::kOverlap, a, b}) != 0;
}

}  // namespace jaxlowbit
