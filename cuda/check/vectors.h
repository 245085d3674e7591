// SPDX-License-Identifier: Apache-2.0
//
// Vectors of the host as buffers of the device.
#pragma once

#include <vector>

#include "cuda/check/device_problem.h"

namespace jaxlowbit::check {

template <typename T>
DeviceBuffer ToDevice(const std::vector<T>& values) {
  DeviceBuffer buffer(static_cast<int64_t>(values.size() * sizeof(T)));
  Check(cudaMemcpy(buffer.data(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice), "copy");
  return buffer;
}

template <typename T>
std::vector<T> ToHost(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  Check(cudaMemcpy(values.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost), "copy");
  return values;
}

}  // namespace jaxlowbit::check
