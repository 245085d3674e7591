// SPDX-License-Identifier: Apache-2.0
//
// Compiled kernels as files, one for each. A file holds its whole key and a checksum, so that one that is cut short,
// damaged or of another key is not taken. Writers rename a whole file into place: readers see all of it or none.
#pragma once

#include <string>

namespace jaxlowbit::jit {

class Cache {
 public:
  // An empty folder means no cache: nothing is found and nothing is kept.
  explicit Cache(std::string folder) : folder_(std::move(folder)) {}

  // $JAXLOWBIT_CACHE_DIR, else jaxlowbit in $XDG_CACHE_HOME or ~/.cache; empty if there is none of them, or if
  // $JAXLOWBIT_CACHE_DIR is.
  static std::string DefaultFolder();

  const std::string& folder() const { return folder_; }

  // The contents under `key`, or an empty string.
  std::string Read(const std::string& key) const;

  // Keeps `contents` under `key`. Returns why it could not, or an empty string; a program goes on without.
  std::string Write(const std::string& key, const std::string& contents) const;

  // The file of a key.
  std::string PathOf(const std::string& key) const;

 private:
  std::string folder_;
};

}  // namespace jaxlowbit::jit
