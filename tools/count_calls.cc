// SPDX-License-Identifier: Apache-2.0
//
// What code compiled with -finstrument-functions calls (CMake option JAXLOWBIT_COUNT_CALLS), for tools/count_calls.py.
// If the environment variable JAXLOWBIT_CALLS names a file, each outermost call of a thread appends a line to it: the
// depth of the deepest stack, then the distinct functions in the order of their first calls, as offsets in the module.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

struct Record {
  size_t depth = 0, deepest = 0;
  std::vector<void*> functions;
};

thread_local Record record;

int File() {
  static const int file = [] {
    const char* name = std::getenv("JAXLOWBIT_CALLS");
    return name == nullptr ? -1 : open(name, O_WRONLY | O_CREAT | O_APPEND, 0644);
  }();
  return file;
}

void Append() {
  Dl_info module;
  if (dladdr(reinterpret_cast<void*>(&File), &module) == 0) return;
  std::string line = std::to_string(record.deepest);
  for (void* function : record.functions) {
    char text[24];
    std::snprintf(text, sizeof text, " %tx",
                  static_cast<char*>(function) - static_cast<char*>(module.dli_fbase));
    line += text;
  }
  line += '\n';
  if (write(File(), line.data(), line.size()) < 0) std::perror("JAXLOWBIT_CALLS");
}

}  // namespace

extern "C" void __cyg_profile_func_enter(void* function, void*) {
  if (File() < 0) return;
  record.deepest = std::max(record.deepest, ++record.depth);
  std::vector<void*>& known = record.functions;
  if (std::find(known.begin(), known.end(), function) == known.end()) known.push_back(function);
}

extern "C" void __cyg_profile_func_exit(void*, void*) {
  if (File() < 0 || --record.depth > 0) return;
  Append();
  record = {};
}
