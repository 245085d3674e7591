// SPDX-License-Identifier: Apache-2.0
//
// Times the ways in which all CTAs can wait for all others: a round stores, then polls.

#include <cstdio>

#include "cuda/check/device_problem.h"
#include "cuda/check/walk_hops.h"

namespace jaxlowbit::check {
namespace {

constexpr int kThreads = 256, kRounds = 2000, kMostCtas = 256;
constexpr int kRowPairs = 1024;  // of entries: a row of 4096 columns

// kCounter: a counter with release and acquire by one thread. kFlags: a flag of each CTA, by one thread each. kRow: a row of
// entries, of which each CTA stores its part. kRowAfterCount: the row is read once a relaxed counter is complete.
enum class Way { kCounter, kFlags, kRow, kRowAfterCount };

__device__ uint64_t LoadRelaxed(const uint64_t* place) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];\n" : "=l"(value) : "l"(place) : "memory");
  return value;
}

__device__ void PollRow(const uint64_t* row, uint64_t round) {
  bool there = false;
  while (!there) {
    there = true;
    uint64_t values[kRowPairs / kThreads][2];
#pragma unroll
    for (int j = 0; j < kRowPairs / kThreads; ++j) {
      asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n"
                   : "=l"(values[j][0]), "=l"(values[j][1])
                   : "l"(row + 2 * (j * kThreads + threadIdx.x))
                   : "memory");
    }
#pragma unroll
    for (auto& pair : values) there &= pair[0] >= round && pair[1] >= round;
  }
}

__global__ void __launch_bounds__(kThreads) HopKernel(Way way, uint64_t* data, int rounds) {
  const auto ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  uint64_t* counter = data + 4096;
  const auto store_row = [&](uint64_t round) {
    const int first = 2 * kRowPairs * cta / ctas, last = 2 * kRowPairs * (cta + 1) / ctas;
    if (first + thread < last) {
      asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(data + first + thread), "l"(round)
                   : "memory");
    }
  };
  for (uint64_t round = 1; round <= static_cast<uint64_t>(rounds); ++round) {
    const uint64_t target = round * static_cast<uint64_t>(ctas);
    switch (way) {
      case Way::kCounter:
        if (thread == 0) {
          asm volatile("red.release.gpu.global.add.u64 [%0], 1;\n" ::"l"(counter) : "memory");
          uint64_t value;
          do {
            asm volatile("ld.acquire.gpu.global.b64 %0, [%1];\n"
                         : "=l"(value)
                         : "l"(counter)
                         : "memory");
          } while (value < target);
        }
        break;
      case Way::kFlags:
        if (thread == 0) {
          asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(data + cta), "l"(round)
                       : "memory");
        }
        if (thread < ctas) {
          while (LoadRelaxed(data + thread) < round) {
          }
        }
        break;
      case Way::kRow:
        store_row(round);
        PollRow(data, round);
        break;
      case Way::kRowAfterCount:
        store_row(round);
        if (thread < 32) {
          __syncwarp();
          if (thread == 0) {
            asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;\n" ::"l"(counter) : "memory");
          }
          while (LoadRelaxed(counter) < target) {
          }
        }
        __syncthreads();
        PollRow(data, round);
        break;
    }
    __syncthreads();
  }
}

}  // namespace

void TimeHops() {
  constexpr const char* kNames[] = {"counter, release and acquire", "a flag of each CTA",
                                    "a row of 4096 as entries", "the row after a relaxed counter"};
  int sms = 0;
  Check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  if (sms > kMostCtas) sms = kMostCtas;
  DeviceBuffer data(8192 * 8);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 4; ++i) {
    float milliseconds[2] = {};
    for (int more = 0; more < 2; ++more) {  // the difference has no start of a kernel
      auto way = static_cast<Way>(i);
      auto* words = static_cast<uint64_t*>(data.data());
      int rounds = more == 0 ? kRounds / 10 : kRounds;
      void* arguments[] = {&way, &words, &rounds};
      Check(cudaMemset(data.data(), 0, data.bytes()), "cudaMemset");
      Check(cudaEventRecord(begin), "cudaEventRecord");
      Check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(HopKernel), dim3(sms),
                                        dim3(kThreads), arguments, 0, nullptr),
            "HopKernel");
      Check(cudaEventRecord(end), "cudaEventRecord");
      Check(cudaEventSynchronize(end), "HopKernel");
      Check(cudaEventElapsedTime(&milliseconds[more], begin, end), "cudaEventElapsedTime");
    }
    std::printf("hop, %-32s %5.2f us from store to seen by %d CTAs\n", kNames[i],
                1e3f * (milliseconds[1] - milliseconds[0]) / (kRounds - kRounds / 10), sms);
  }
  Check(cudaEventDestroy(begin), "cudaEventDestroy");
  Check(cudaEventDestroy(end), "cudaEventDestroy");
}

}  // namespace jaxlowbit::check
