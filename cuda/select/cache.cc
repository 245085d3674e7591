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
using Key = std::array<int64_t, 38>;

// The bindings name every field: a new one does not compile until it is part of the key.
Key KeyOf(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
          const TunedTable* tuned) {
  const auto& [batch, num_weights, m, n, k, bits, codebook, group_size, lhs, scale, out, zero,
               transposed, scale_sums, scales_rows, half_sums, permuted_parts, epilogue, pdl,
               lhs_aligned, weights_aligned] = problem;
  const auto& [activation, gated, bias, residual] = epilogue;
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

struct Cache {
  std::mutex mutex;
  std::unordered_map<Key, Choice, Hash> choices;
};

}  // namespace

Choice SelectCached(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes,
                    const TunedTable* tuned) {
  static Cache cache;
  const Key key = KeyOf(problem, device, workspace_bytes, tuned);
  {
    const std::lock_guard lock(cache.mutex);
    const auto found = cache.choices.find(key);
    if (found != cache.choices.end()) return found->second;
  }
  const Choice choice = Select(problem, device, workspace_bytes, tuned);
  const std::lock_guard lock(cache.mutex);
  if (cache.choices.size() >= kMostEntries) cache.choices.clear();
  cache.choices.emplace(key, choice);
  return choice;
}

}  // namespace jaxlowbit
