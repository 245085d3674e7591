// SPDX-License-Identifier: Apache-2.0
//
// Measured choices, which take the place of the cost model. Tables are set by the name of the device that they were
// measured on, before its kernels are loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/problem.h"
#include "cuda/select/choice.h"

namespace jaxlowbit {

// The choice for products like `problem`, of `least_m` rows up to its number of rows.
struct TunedEntry {
  QuantizedMatmul problem;
  Choice choice;
  int64_t least_m = 1;
};

class TunedTable {
 public:
  explicit TunedTable(std::vector<TunedEntry> entries);

  // The choice of the entry for the least m that is not below the problem's, if there is one that stands for so few
  // rows. Entries stand for single products with float32 accumulators, neither batched nor transposed.
  std::optional<Choice> Find(const QuantizedMatmul& problem) const;

  // Differs between tables, those included that are gone; never 0.
  int64_t number() const { return number_; }

 private:
  std::vector<TunedEntry> entries_;  // sorted
  int64_t number_;
};

// Replaces the table of a device.
void SetTuned(const std::string& device_name, std::vector<TunedEntry> entries);

// The table of a device, or null.
std::shared_ptr<const TunedTable> TunedFor(const std::string& device_name);

}  // namespace jaxlowbit
