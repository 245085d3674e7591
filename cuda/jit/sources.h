// SPDX-License-Identifier: Apache-2.0
//
// Kernel sources embedded in this library for JIT compilation. tools/embed_sources.py generates the definitions at
// build time.
#pragma once

#include <cstddef>

namespace jaxlowbit::jit {

struct Source {
  const char* name;  // path in #include
  const char* text;
};

extern const Source kSources[];
extern const size_t kNumSources;
extern const char kSourcesDigest[];  // hash of all names and texts

}  // namespace jaxlowbit::jit
