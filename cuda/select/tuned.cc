// SPDX-License-Identifier: Apache-2.0

#include "cuda/select/tuned.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cuda/kernels/sm90_stream/plan.h"

namespace jaxlowbit {
namespace {

// Key of an entry: everything except m that affects the time of a product. Sizes are in atoms, since weights are padded
// to whole atoms.
auto KindOf(const QuantizedMatmul& problem) {
  return std::make_tuple(problem.bits, problem.codebook, problem.group_size, problem.zero,
                         problem.lhs, problem.scale, problem.n_blocks(), problem.k_blocks());
}

bool IsBefore(const TunedEntry& left, const TunedEntry& right) {
  return std::make_pair(KindOf(left.problem), left.problem.m) <
         std::make_pair(KindOf(right.problem), right.problem.m);
}

struct Tables {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const TunedTable>> by_device;
};

Tables& AllTables() {
  static Tables tables;
  return tables;
}

}  // namespace

TunedTable::TunedTable(std::vector<TunedEntry> entries)
    : number([] {
        static std::atomic<int64_t> tables{0};
        return ++tables;
      }()),
      entries_(std::move(entries)) {
  std::sort(entries_.begin(), entries_.end(), IsBefore);
}

std::optional<Choice> TunedTable::Find(const QuantizedMatmul& problem) const {
  if (problem.batch != 1 || problem.transposed || problem.scale_accumulators ||
      problem.may_accumulate_float16() || problem.epilogue.gated) {
    return std::nullopt;
  }
  const auto found =
      std::lower_bound(entries_.begin(), entries_.end(), TunedEntry{problem, {}}, IsBefore);
  if (found == entries_.end() || KindOf(found->problem) != KindOf(problem)) return std::nullopt;
  if (problem.m < found->min_m) return std::nullopt;
  Choice choice = found->choice;
  choice.tuned = true;
  // The entry may have a larger m and a larger instance.
  if (choice.kernel == Kernel::kQmmSm90Stream) choice.block_m = sm90_stream::BlockM(problem.m);
  return choice;
}

void SetTuned(const std::string& device_name, std::vector<TunedEntry> entries) {
  Tables& tables = AllTables();
  const auto table = std::make_shared<const TunedTable>(std::move(entries));
  const std::lock_guard lock(tables.mutex);
  tables.by_device[device_name] = table;
}

std::shared_ptr<const TunedTable> TunedFor(const std::string& device_name) {
  Tables& tables = AllTables();
  const std::lock_guard lock(tables.mutex);
  const auto found = tables.by_device.find(device_name);
  return found == tables.by_device.end() ? nullptr : found->second;
}

}  // namespace jaxlowbit
