// SPDX-License-Identifier: Apache-2.0

#include "cuda/jit/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace jaxlowbit::jit {
namespace {

constexpr char kMagic[] = "jaxlowbit cubin 1\n";

// FNV-1a.
uint64_t Checksum(const std::string& bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

std::string Hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// File header: the key and a checksum of the contents.
std::string HeaderOf(const std::string& key, const std::string& contents) {
  return kMagic + std::to_string(key.size()) + '\n' + key + '\n' +
         Hex(Checksum(key + '\n' + contents)) + '\n';
}

std::string ReadFile(const std::string& path) {
  std::string bytes;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return bytes;
  char block[1 << 16];
  for (size_t count; (count = std::fread(block, 1, sizeof block, file)) > 0;) {
    bytes.append(block, count);
  }
  std::fclose(file);
  return bytes;
}

bool WriteAll(int file, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t written = write(file, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

// Like mkdir -p, with permissions for this user only.
void MakeFolders(const std::string& folder) {
  for (size_t end = 1; end <= folder.size(); ++end) {
    if (end == folder.size() || folder[end] == '/') mkdir(folder.substr(0, end).c_str(), 0700);
  }
}

}  // namespace

std::string Cache::DefaultFolder() {
  if (const char* folder = std::getenv("JAXLOWBIT_CACHE_DIR")) return folder;
  const char* base = std::getenv("XDG_CACHE_HOME");
  if (base != nullptr && base[0] == '/') return std::string(base) + "/jaxlowbit";
  const char* home = std::getenv("HOME");
  if (home != nullptr && home[0] == '/') return std::string(home) + "/.cache/jaxlowbit";
  return "";
}

std::string Cache::PathOf(const std::string& key) const {
  return folder_ + "/" + Hex(Checksum(key)) + ".cubin";
}

std::string Cache::Read(const std::string& key) const {
  if (folder_.empty()) return "";
  const std::string bytes = ReadFile(PathOf(key));
  const size_t header = HeaderOf(key, "").size();
  if (bytes.size() <= header) return "";
  std::string contents = bytes.substr(header);
  return bytes.compare(0, header, HeaderOf(key, contents)) == 0 ? contents : "";
}

std::string Cache::Write(const std::string& key, const std::string& contents) const {
  if (folder_.empty()) return "";
  MakeFolders(folder_);
  static std::atomic<int> count{0};
  const std::string path = PathOf(key);
  const std::string temporary =
      path + "." + std::to_string(getpid()) + "." + std::to_string(count++) + ".tmp";
  const auto failed = [&](const char* what) {
    const std::string why = std::string(what) + " " + temporary + ": " + std::strerror(errno);
    unlink(temporary.c_str());
    return why;
  };
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return failed("cannot create");
  const bool written = WriteAll(file, HeaderOf(key, contents) + contents) && fsync(file) == 0;
  const int error = errno;
  const bool closed = close(file) == 0;
  if (!written) errno = error;
  if (!written || !closed) return failed("cannot write");
  if (rename(temporary.c_str(), path.c_str()) != 0) return failed("cannot rename");
  return "";
}

}  // namespace jaxlowbit::jit
