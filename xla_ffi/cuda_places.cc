// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cuda_places.h"

#include <algorithm>

namespace jaxlowbit {

std::vector<int64_t> PlacesRead(const Call& call, const Step& step) {
  std::vector<int64_t> places;
  switch (step.kind) {
    case StepKind::kMultiply:
      for (int64_t i = step.first; i < step.first + step.count; ++i) {
        const Places& at = call.products[i].places;
        for (int64_t place :
             {at.lhs, at.packed, at.scale, at.zero, at.unit, at.index, at.group_sizes,
              at.group_offset, at.permutation, at.bias, at.residual, at.lhs_scale}) {
          if (place != 0) places.push_back(place);
        }
      }
      break;
    case StepKind::kRound:
    case StepKind::kNormalize:
    case StepKind::kRoute:
      for (int64_t place : {step.x, step.addend, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      break;
    case StepKind::kGroup:
    case StepKind::kCombine:
      for (int64_t place : {step.x, step.expert, step.offset, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      if (step.kind == StepKind::kCombine) places.push_back(step.place);
      break;
    case StepKind::kAttend:
      break;
  }
  return places;
}

std::vector<int64_t> PlacesWritten(const Call& call, const Step& step) {
  std::vector<int64_t> places;
  if (step.kind == StepKind::kAttend) return places;
  if (step.kind != StepKind::kMultiply) {
    places = {step.total, step.out, step.out_scale, step.sizes};
    if (step.kind == StepKind::kGroup) places.push_back(step.place);
    if (step.kind == StepKind::kRoute) places.push_back(step.expert);
  } else {
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      places.push_back(call.products[i].places.out);
    }
  }
  places.erase(std::remove(places.begin(), places.end(), 0), places.end());
  return places;
}

}  // namespace jaxlowbit
