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
        workspace_bytes, tuned == nullptr ? int64_t{0} : tuned->number()}) {
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

template <typename Value>
class Cache {
 public:
  // Returns the cached value for a key; on a miss, caches compute().
  template <typename Compute>
  Value Find(const Key& key, Compute compute) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = entries_.find(key);
      if (found != entries_.end()) return found->second;
    }
    const Value computed = compute();
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= kMaxEntries) entries_.clear();
    entries_.emplace(key, computed);
    return computed;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, Value, Hash> entries_;
};

}  // namespace

Choice SelectCached(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
                    const TunedTable* tuned) {
  static Cache<Choice> cache;
  return cache.Find(KeyOf(problem, device, workspace_bytes, tuned),
                    [&] { return Select(problem, device, workspace_bytes, tuned); });
}

Support SupportsCached(Kernel kernel, const QuantizedMatmul& problem, const Device& device) {
  static Cache<Support> caches[kNumKernels];
  return caches[static_cast<int>(kernel)].Find(KeyOf(problem, device, 0, nullptr),
                                               [&] { return Supports(kernel, problem, device); });
}

Support SupportsCached(const QuantizedMatmul& problem, const Device& device) {
  static Cache<Support> cache;
  return cache.Find(KeyOf(problem, device, 0, nullptr), [&] { return Supports(problem, device); });
}

}  // namespace jaxlowbit
