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

constexpr size_t kMostEntries = 4096;

// All that Select depends on, as numbers.
using Key = std::array<int64_t, 39>;

// The bindings name every field: a new one does not compile until it is part of the key.
Key KeyOf(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
          const TunedTable* tuned) {
  const auto& [batch, num_weights, m, n, k, bits, codebook, group_size, lhs, scale, out, zero,
               transposed, scale_sums, scales_rows, half_sums, permuted_parts, epilogue, pdl,
               lhs_aligned, weights_aligned, rounding] = problem;
  const auto& [activation, gated, units, bias, residual] = epilogue;  // no choice depends on units
  const auto& [compute_capability, num_sms, shared_bytes_per_sm, clock_mhz, memory_gb_per_s,
               clusters, compiles, ordinal, architecture] = device;  // the last two: for launches
  const auto number = [](auto value) { return static_cast<int64_t>(value); };
  return {batch,
          num_weights,
          m,
          n,
          k,
          bits,
          number(codebook),
          group_size,
          number(lhs),
          number(scale),
          number(out),
          number(zero),
          transposed,
          scale_sums,
          scales_rows,
          number(rounding),
          half_sums,
          permuted_parts,
          pdl,
          lhs_aligned,
          weights_aligned,
          number(activation),
          gated,
          number(bias),
          number(residual),
          compute_capability,
          num_sms,
          shared_bytes_per_sm,
          clock_mhz,
          memory_gb_per_s,
          clusters[1][1],
          clusters[1][2],
          clusters[1][4],
          clusters[2][1],
          clusters[2][2],
          clusters[2][4],
          reinterpret_cast<int64_t>(compiles),
          workspace_bytes,
          tuned == nullptr ? 0 : tuned->number()};
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

template <typename Answer>
class Cache {
 public:
  // The answer that is known for a key, or else that of ask(), which it keeps.
  template <typename Ask>
  Answer Find(const Key& key, Ask ask) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = answers_.find(key);
      if (found != answers_.end()) return found->second;
    }
    const Answer answer = ask();
    const std::lock_guard lock(mutex_);
    if (answers_.size() >= kMostEntries) answers_.clear();
    answers_.emplace(key, answer);
    return answer;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, Answer, Hash> answers_;
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
