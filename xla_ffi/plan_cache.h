// SPDX-License-Identifier: Apache-2.0
//
// Caches the plans of calls. The key is the whole call except its pointers: attributes, types and shapes of buffers, and
// the device. A plan may depend on pointers only by the questions that it records (cuda/ways.h), so one key may have
// several plans.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/ways.h"
#include "xla_ffi/ffi.h"

namespace jaxlowbit {

// A call as numbers, and its pointers: operands, then results.
struct CallKey {
  std::vector<int64_t> numbers;
  std::vector<void*> pointers;
  uint64_t hash = 0;
  bool complete =
      true;  // false: a value of unknown size is missing, so equal keys may be different calls

  // `device` and `table` number the device and its table of measured choices.
  void Read(ffi::RemainingArgs args, ffi::RemainingRets rets, RawAttributes attributes,
            int64_t device = 0, int64_t table = 0);

 private:
  void Append(const void* data, size_t bytes);
};

// Thread-safe. Plans are never freed, and once the cache is full no more are kept. So must the cache be: threads may
// still run when the process ends.
template <typename Plan>
class PlanCache {
 public:
  static constexpr int kMaxPlansPerKey = 16;

  explicit PlanCache(size_t max_keys) : max_keys_(max_keys) {}

  // The plan for a call, or null. `typical`: ignores its pointers, and returns the plan for typical ones (Ways).
  const Plan* Find(const CallKey& key, bool typical = false) {
    thread_local std::array<const Entry*, 256> recent = {};
    const Entry*& last = recent[key.hash % recent.size()];
    if (last == nullptr || last->cache != this || last->numbers != key.numbers) {
      const std::shared_lock<std::shared_mutex> lock(mutex_);
      const Entry* found = Lookup(key);
      if (found == nullptr) return nullptr;
      last = found;
    }
    return last->Find(key, typical);
  }

  // Keeps a plan, unless the cache is full or has one. `questions`: asked by the plan; `typical`: it was made for
  // typical pointers.
  void Keep(const CallKey& key, std::vector<Question> questions, bool typical,
            std::shared_ptr<const Plan> plan) {
    if (!key.complete) return;
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    Entry* entry = Lookup(key);
    if (entry == nullptr) {
      if (entries_.size() >= max_keys_) return;
      entry = entries_.emplace(key.hash, std::make_unique<Entry>(this, key.numbers))->second.get();
    }
    if (entry->count == kMaxPlansPerKey || entry->Find(key, typical) != nullptr) return;
    ++entry->count;
    entry->plans.store(new Kept{std::move(questions), typical, std::move(plan), entry->plans},
                       std::memory_order_release);
  }

  size_t keys() const {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    return entries_.size();
  }

 private:
  struct Kept {
    std::vector<Question> questions;
    bool typical;
    std::shared_ptr<const Plan> plan;
    const Kept* next;
  };

  struct Entry {
    Entry(const PlanCache* cache, std::vector<int64_t> numbers)
        : cache(cache), numbers(std::move(numbers)) {}

    const Plan* Find(const CallKey& key, bool typical) const {
      for (const Kept* kept = plans.load(std::memory_order_acquire); kept; kept = kept->next) {
        if (typical ? kept->typical : HaveSameWays(kept->questions, key.pointers.data())) {
          return kept->plan.get();
        }
      }
      return nullptr;
    }

    const PlanCache* cache;
    std::vector<int64_t> numbers;
    std::atomic<const Kept*> plans{nullptr};
    int count = 0;
  };

  // Requires the lock.
  Entry* Lookup(const CallKey& key) const {
    const auto [begin, end] = entries_.equal_range(key.hash);
    for (auto found = begin; found != end; ++found) {
      if (found->second->numbers == key.numbers) return found->second.get();
    }
    return nullptr;
  }

  const size_t max_keys_;
  mutable std::shared_mutex mutex_;
  std::unordered_multimap<uint64_t, std::unique_ptr<Entry>> entries_;
};

}  // namespace jaxlowbit
