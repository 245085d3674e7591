// SPDX-License-Identifier: Apache-2.0
//
// The kernels' own sources, which this library carries to compile them where they run. tools/embed_sources.py writes
// the definitions at build time.
#pragma once

#include <cstddef>

namespace jaxlowbit::jit {

struct Source {
  const char* name;  // as it is included
  const char* text;
};

extern const Source kSources[];
extern const size_t kNumSources;
extern const char kSourcesDigest[];  // of all names and texts

}  // namespace jaxlowbit::jit
