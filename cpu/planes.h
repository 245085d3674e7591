// SPDX-License-Identifier: Apache-2.0
//
// The order of bits in the packed layout (docs/layout.md) for the CPU kernel; jaxlowbit/_core/layout.py defines the
// same in Python.
#pragma once

#include "cuda/problem.h"

namespace jaxlowbit {

inline constexpr int kMaxBits = 8;
inline constexpr int kMaxPlanes = 3;

// Bits [shift, shift + bits) of every code. `slots` names the binary digits of a slot's number, highest first; a lane's
// slots are consecutive from the lowest bit of its first word.
struct Plane {
  int bits = 0;  // 0: no plane
  int shift = 0;
  const char* slots = "";

  // The distance of two slots that are adjacent in `digit`, in bits.
  constexpr int Stride(char digit) const {
    int i = 0;
    while (slots[i] != digit) ++i;
    return bits << (4 - i);
  }

  // Earlier planes contain `shift` bits of each code.
  constexpr int first_word() const { return static_cast<int>(kAtom * kAtom) / 32 * shift; }
};

inline constexpr Plane kPlanes[kMaxBits + 1][kMaxPlanes] = {
    {},
    {{1, 0, "eSsvh"}},
    {{2, 0, "Sesvh"}},
    {{2, 0, "Sevhs"}, {1, 2, "evhSs"}},
    {{4, 0, "Ssevh"}},
    {{4, 0, "Ssehv"}, {1, 4, "ehSsv"}},
    {{4, 0, "Ssehv"}, {2, 4, "Sehsv"}},
    {{4, 0, "Ssehv"}, {2, 4, "Sehsv"}, {1, 6, "ehSsv"}},
    {{8, 0, "Ssveh"}},
};

// All planes of a width have the same strides of e and h, so planes merge by shifts and masks.
constexpr int StrideOfE(int bits) { return kPlanes[bits][0].Stride('e'); }
constexpr int StrideOfH(int bits) { return kPlanes[bits][0].Stride('h'); }

constexpr bool PlanesMerge() {
  for (int bits = 1; bits <= kMaxBits; ++bits) {
    for (const Plane& plane : kPlanes[bits]) {
      if (plane.bits == 0) continue;
      if (plane.Stride('e') != StrideOfE(bits) || plane.Stride('h') != StrideOfH(bits))
        return false;
    }
  }
  return true;
}
static_assert(PlanesMerge());

}  // namespace jaxlowbit
