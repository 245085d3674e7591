// SPDX-License-Identifier: Apache-2.0
//
// GPU properties that the selection and launches depend on, and limits of the architectures.
#pragma once

namespace jaxlowbit {

// Shared memory per SM. The system reserves a part of it for each CTA.
inline constexpr int kSm90SharedBytesPerSm = 228 * 1024;
inline constexpr int kSm86SharedBytesPerSm = 100 * 1024;  // and sm_89: the smallest
inline constexpr int kReservedSharedBytes = 1024;

// Maximum shared memory per CTA, in whole KiB, if `ctas_per_sm` CTAs share an sm_90 multiprocessor.
constexpr int Sm90SharedBytes(int ctas_per_sm) {
  return kSm90SharedBytesPerSm / 1024 / ctas_per_sm * 1024 - kReservedSharedBytes;
}

struct Device {
  int compute_capability = 0;  // 10 * major + minor
  int num_sms = 0;
  int shared_bytes_per_sm = 0;
  int clock_mhz = 0;        // maximum SM clock; 0: unknown
  int memory_gb_per_s = 0;  // at the maximum memory clock; 0: unknown
  // Clusters resident at a time, by CTAs per multiprocessor (1, 2) and CTAs per cluster (1, 2, 4).
  int clusters[3][5] = {};
  // Whether instances can be JIT-compiled; null: yes. Called only when needed, since the first call loads the compiler.
  bool (*compiles)() = nullptr;
  bool can_compile() const { return compiles == nullptr || compiles(); }
  // For launches: the CUDA ordinal, and the actual architecture if the device is treated as an older one.
  int ordinal = 0;
  int architecture = 0;
};

// The H200 that the cost models were fitted on; costs are microseconds at its clock.
inline constexpr int kFittedClockMhz = 1980, kFittedMemoryGbPerS = 4814;

// Ratio of a rate to that rate on the H200; 1 if unknown or within 5 %, since boards differ a little.
constexpr double RelativeRate(int rate, int fitted) {
  const double relative = static_cast<double>(rate) / fitted;
  return rate <= 0 || (relative > 0.95 && relative < 1.05) ? 1 : relative;
}

constexpr double RelativeClock(const Device& device) {
  return RelativeRate(device.clock_mhz, kFittedClockMhz);
}

// Memory bytes per multiprocessor clock, relative to the H200.
constexpr double RelativeMemoryRate(const Device& device) {
  return RelativeRate(device.memory_gb_per_s, kFittedMemoryGbPerS) / RelativeClock(device);
}

}  // namespace jaxlowbit
