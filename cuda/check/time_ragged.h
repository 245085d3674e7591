// SPDX-License-Identifier: Apache-2.0
//
// Checks and times the choices of ragged products: the experts of real models, with tokens that choose them at random.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace jaxlowbit::check {

struct RaggedOptions {
  std::vector<std::string> models;  // empty: all
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096};
  double seconds = std::numeric_limits<double>::infinity();
  bool all = false;   // also choices whose predicted time is far from the shortest
  bool json = false;  // lines of JSON
  bool pdl = false;   // all but the first launch of a graph use programmatic dependent launch
};

// Reads the options behind the command. Returns "", or an error message.
std::string ParseRagged(int argc, char** argv, RaggedOptions* options);

// Times the products of each model and number of tokens: rows sorted by group and, if there are few, listed rows.
// Checks each choice first. Starts none of these after `seconds`. Returns whether all results were correct.
bool TimeRagged(const RaggedOptions& options);

}  // namespace jaxlowbit::check
