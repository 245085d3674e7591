// SPDX-License-Identifier: Apache-2.0
//
// Measured choices, which override the cost model. Tables are keyed by device name and must be set before the kernels
// of that device are loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// The choice for products like `problem` with min_m <= m <= problem.m.
struct TunedEntry {
  QuantizedMatmul problem;
  Choice choice;
  int64_t min_m = 1;
};

class TunedTable {
 public:
  explicit TunedTable(std::vector<TunedEntry> entries);

  // Returns the choice of the entry with the smallest m >= the problem's, if the entry's range includes the problem's
  // m. Entries are for single products with float32 accumulators, neither batched nor transposed.
  std::optional<Choice> Find(const QuantizedMatmul& problem) const;

  // Unique over all tables, including destroyed ones; never 0.
  const int64_t number;

 private:
  std::vector<TunedEntry> entries_;  // sorted
};

// Replaces the table of a device.
void SetTuned(const std::string& device_name, std::vector<TunedEntry> entries);

// The table of a device, or null.
std::shared_ptr<const TunedTable> TunedFor(const std::string& device_name);

}  // namespace jaxlowbit
