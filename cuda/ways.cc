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
    bool holds = first % kAlignment == 0;
    if (kind != Question::Kind::kAligned) {
      const uintptr_t second = reinterpret_cast<uintptr_t>(pointers[b.data.buffer]) + b.data.offset;
      holds = kind == Question::Kind::kSame ? first == second
                                            : first < second + b.bytes && second < first + a.bytes;
    }
    if (holds != answer) return false;
  }
  return true;
}

Buffers BuffersAt(const Addresses& addresses, void* const* pointers) {
  Buffers buffers;
  buffers.codebook = addresses.codebook;
#define JAXLOWBIT_BUFFER(type, name)                                        \
  if (addresses.name.buffer >= 0) {                                         \
    char* const data = static_cast<char*>(pointers[addresses.name.buffer]); \
    buffers.name = reinterpret_cast<type*>(data + addresses.name.offset);   \
  }
#include "cuda/buffers.def"
  return buffers;
}

bool Ways::Ask(const Question& question) {
  for (const Question& known : questions_) {
    if (known.kind == question.kind && IsEqual(known.a, question.a) &&
        IsEqual(known.b, question.b)) {
      return known.answer;
    }
  }
  Question asked = question;
  if (pointers_ != nullptr) {
    asked.answer = true;
    asked.answer = HaveSameWays({asked}, pointers_);
  }
  questions_.push_back(asked);
  return asked.answer;
}

// Offsets are reduced, so that the parts of a product ask few questions.
bool Ways::IsAligned(const Address& address) {
  if (address == nullptr) return true;
  const int64_t offset = address.offset % kAlignment;
  return Ask({Question::Kind::kAligned, {{address.buffer, offset}, 0}, {}, offset == 0});
}

bool Ways::IsSame(const Address& a, const Address& b, bool typical) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr || a.buffer == b.buffer) return false;
  return Ask({Question::Kind::kSame, {a, 0}, {b, 0}, typical});
}

bool Ways::Overlap(const AddressExtent& a, const AddressExtent& b) {
  if (a.bytes <= 0 || b.bytes <= 0 || a.data == nullptr || b.data == nullptr) return false;
  if (a.data.buffer == b.data.buffer) {
    return a.data.offset < b.data.offset + b.bytes && b.data.offset < a.data.offset + a.bytes;
  }
  return Ask({Question::Kind::kOverlap, a, b});
}

}  // namespace jaxlowbit
