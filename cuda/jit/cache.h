// SPDX-License-Identifier: Apache-2.0
//
// Cache of compiled kernels, one file each. A file contains its key and a checksum, so truncated, damaged or colliding
// files are ignored. Writers rename a complete file into place, so readers never see part of one.
#pragma once

#include <string>

namespace jaxlowbit::jit {

class Cache {
 public:
  // Empty folder: no cache.
  explicit Cache(std::string folder) : folder_(std::move(folder)) {}

  // $JAXLOWBIT_CACHE_DIR if set, even if empty; else $XDG_CACHE_HOME/jaxlowbit or ~/.cache/jaxlowbit; else empty.
  static std::string DefaultFolder();

  const std::string& folder() const { return folder_; }

  // Returns the contents for `key`, or an empty string.
  std::string Read(const std::string& key) const;

  // Stores `contents` for `key`. Returns an error message or an empty string; callers continue after errors.
  std::string Write(const std::string& key, const std::string& contents) const;

  // Path of a key's file.
  std::string PathOf(const std::string& key) const;

 private:
  std::string folder_;
};

}  // namespace jaxlowbit::jit
