// SPDX-License-Identifier: Apache-2.0

#include "cuda/select/cache.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "cuda/select/tuned.h"

namespace jaxlowbit {
namespace {

constexpr size_t kMaxEntries = 4096;

// Everything that Select depends on: the fields of the product and of the device, the workspace and the table.
constexpr size_t kDeviceNumbers = 12, kCallNumbers = 2;
using Key = std::array<int64_t, kFields + kDeviceNumbers + kCallNumbers>;

// The structured binding names every field of Device, so a new field does not compile until the key includes it.
Key KeyOf(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
          const TunedTable* tuned) {
  const auto& [compute_capability, num_sms, shared_bytes_per_sm, clock_mhz, memory_gb_per_s,
               clusters, compiles, ordinal, architecture] = device;  // the last two: for launches
  Key key;
  size_t count = 0;
  VisitFields(problem,
              [&](const char*, auto field) { key[count++] = static_cast<int64_t>(field); });
  for (int64_t number :
       {int64_t{compute_capability}, int64_t{num_sms}, int64_t{shared_bytes_per_sm},
        int64_t{clock_mhz}, int64_t{memory_gb_per_s}, int64_t{clusters[1][1]},
        int64_t{clusters[1][2]}, int64_t{clusters[1][4]}, int64_t{clusters[2][1]},
        int64_t{clusters[2][2]}, int64_t{clusters[2][4]}, reinterpret_cast<int64_t>(compiles),
        workspace_bytes, tuned == nullptr ? int64_t{0} : tuned->number}) {
    key[count++] = number;
  }
  return key;
}

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (int64_t value : key) {  // the upper bits are mixed in
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

}  // namespace

Choice SelectCached(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
                    const TunedTable* tuned) {
  static std::mutex mutex;
  static auto& choices = *new std::unordered_map<Key, Choice, Hash>;
  const Key key = KeyOf(problem, device, workspace_bytes, tuned);
  {
    const std::lock_guard lock(mutex);
    const auto found = choices.find(key);
    if (found != choices.end()) return found->second;
  }
  const Choice choice = Select(problem, device, workspace_bytes, tuned);
  const std::lock_guard lock(mutex);
  if (choices.size() >= kMaxEntries) choices.clear();
  choices.emplace(key, choice);
  return choice;
}

}  // namespace jaxlowbit
