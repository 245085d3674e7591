// SPDX-License-Identifier: Apache-2.0

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/check/device_problem.h"
#include "cuda/check/random.cuh"
#include "cuda/check/time_exchange.h"
#include "cuda/launch.h"
#include "cuda/ops/exchange.h"
#include "cuda/ops/rms_norm.h"

namespace jaxlowbit::check {
namespace {

using T = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kRounds = 64;   // of a graph
constexpr int kRepeats = 20;  // of a graph
constexpr int kChecked = 12;  // rounds of a check
const std::vector<int64_t> kRows = {1, 2, 4, 8, 16, 32};
const std::vector<int64_t> kColumns = {64,   576,   4096, 5120,
                                       8192, 12296, 16384};  // 12296: a part of a warp
const std::vector<int64_t> kTimedColumns = {4096, 8192};

// An element of a device's partial sum: now and then -0 or a NaN whose bits are all 1.
__device__ float PartOf(int rank, int round, int64_t i) {
  const uint64_t seed = (static_cast<uint64_t>(rank * 1000 + round) << 40) + i;
  if (round == 5 && i == 3 && rank == 1) return __uint_as_float(~0u);
  return Hash(seed) % 5 == 0 ? -0.0f : Normal(seed);
}

// The partial sums of rank `last` if it is `first`, else the sums from rank `first` on.
__global__ void FillParts(float* parts, int64_t count, int first, int last, int round) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    float sum = first == last ? PartOf(first, round, i) : 0;
    for (int rank = first; first != last && rank <= last; ++rank) {
      sum = __fadd_rn(sum, PartOf(rank, round, i));  // no fused multiplication
    }
    parts[i] = sum;
  }
}

__global__ void FillRows(T* data, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    data[i] = T(Normal(i + (seed << 40)));
  }
}

__global__ void Delay(int64_t clocks) {
  const int64_t start = clock64();
  while (clock64() - start < clocks) {
  }
}

// The normalizations of one GPU, each round with separate buffers.
class Member {
 public:
  // Adds the partial sums of ranks `first` to `last`.
  Member(int device, int first, int last, int64_t rows, int64_t columns, int rounds)
      : device_(device), rows_(rows), columns_(columns), rounds_(rounds) {
    Use();
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const int64_t count = rows * columns;
    x_ = std::make_unique<DeviceBuffer>(count * 2);
    scale_ = std::make_unique<DeviceBuffer>(columns * 2);
    parts_ = std::make_unique<DeviceBuffer>(rounds * count * 4);
    sums_ = std::make_unique<DeviceBuffer>(rounds * count * 2);
    outs_ = std::make_unique<DeviceBuffer>(rounds * count * 2);
    FillRows<<<64, kThreads, 0, stream_>>>(static_cast<T*>(x_->data()), count, 1);
    FillRows<<<64, kThreads, 0, stream_>>>(static_cast<T*>(scale_->data()), columns, 2);
    for (int round = 0; round < rounds; ++round) {
      FillParts<<<64, kThreads, 0, stream_>>>(static_cast<float*>(parts_->data()) + round * count,
                                              count, first, last, round);
    }
    Delay<<<1, 1, 0, stream_>>>(1);  // loads it
    Synchronize();
  }
  Member(const Member&) = delete;
  ~Member() {
    Use();
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
    for (auto* buffer : {&x_, &scale_, &parts_, &sums_, &outs_}) buffer->reset();
  }

  void Use() const { Check(cudaSetDevice(device_), "cudaSetDevice"); }
  void Synchronize() const {
    Use();
    Check(cudaStreamSynchronize(stream_), "normalization");
  }
  void Wait(int64_t clocks) const {
    Use();
    Delay<<<1, 1, 0, stream_>>>(clocks);
  }

  void Enqueue(const Exchange& exchange, int round) const {
    const int64_t count = rows_ * columns_;
    const RmsNorm norm = {ElementType::kBf16,
                          ElementType::kBf16,
                          ElementType::kF32,
                          rows_,
                          columns_,
                          x_->data(),
                          static_cast<float*>(parts_->data()) + round * count,
                          scale_->data(),
                          static_cast<T*>(sums_->data()) + round * count,
                          static_cast<T*>(outs_->data()) + round * count,
                          1e-5f,
                          exchange};
    Use();
    Check(LaunchRmsNorm(norm, DeviceInfo(device_), stream_), "LaunchRmsNorm");
  }

  void Capture(const Exchange& exchange) {
    Use();
    cudaGraph_t graph;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kRounds; ++i) Enqueue(exchange, i % rounds_);
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    Check(cudaGraphUpload(graph_, stream_), "cudaGraphUpload");
    Synchronize();
  }
  void Replay(cudaEvent_t begin, cudaEvent_t end) const {
    Use();
    Check(cudaEventRecord(begin, stream_), "cudaEventRecord");
    Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    Check(cudaEventRecord(end, stream_), "cudaEventRecord");
  }

  // All sums, then all normalized rows.
  std::vector<uint16_t> Results() const {
    Synchronize();
    std::vector<uint16_t> results(2 * rounds_ * rows_ * columns_);
    const size_t bytes = results.size();
    Check(cudaMemcpy(results.data(), sums_->data(), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    Check(cudaMemcpy(results.data() + bytes / 2, outs_->data(), bytes, cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return results;
  }

 private:
  int device_;
  int64_t rows_, columns_;
  int rounds_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  std::unique_ptr<DeviceBuffer> x_, scale_, parts_, sums_, outs_;
};

// A member on each GPU of a group, and the memory that they share.
struct Group {
  Group(int parts, int64_t rows, int64_t columns, int rounds) {
    std::vector<int> devices;
    for (int i = 0; i < parts; ++i) devices.push_back(i);
    for (int i = 0; i < parts; ++i) {
      members.push_back(std::make_unique<Member>(i, i, i, rows, columns, rounds));
      exchanges.emplace_back();
      Check(FindExchange(devices, i, columns, &exchanges.back()), "FindExchange");
    }
  }

  std::vector<std::unique_ptr<Member>> members;
  std::vector<Exchange> exchanges;
};

// Whether all GPUs get the bits that one gets from the sums; some are late in each round.
bool IsCorrect(int parts, int64_t rows, int64_t columns) {
  const Group group(parts, rows, columns, kChecked);
  const Member alone(0, 0, parts - 1, rows, columns, kChecked);
  for (int round = 0; round < kChecked; ++round) {
    alone.Enqueue({}, round);
    for (int i = 0; i < parts; ++i) {
      if ((round + i) % 3 == 0) group.members[i]->Wait(50000 * (1 + i));
      group.members[i]->Enqueue(group.exchanges[i], round);
    }
  }
  const std::vector<uint16_t> expected = alone.Results();
  for (int i = 0; i < parts; ++i) {
    const std::vector<uint16_t> found = group.members[i]->Results();
    if (found == expected) continue;
    const auto differs = std::mismatch(found.begin(), found.end(), expected.begin()).first;
    std::printf("WRONG  exchange of %d GPUs, %lld rows of %lld: GPU %d, element %lld\n", parts,
                static_cast<long long>(rows), static_cast<long long>(columns), i,
                static_cast<long long>(differs - found.begin()));
    return false;
  }
  return true;
}

// Whether a device whose peers send nothing gives up, and the group works again afterwards.
bool StopsInTime(int parts) {
  constexpr int64_t kLength = 4096;
  Group group(parts, 1, kLength, 1);
  for (Exchange& exchange : group.exchanges) exchange.patience = 100;
  for (int i = 0; i + 1 < parts; ++i) group.members[i]->Enqueue(group.exchanges[i], 0);
  for (int i = 0; i + 1 < parts; ++i) group.members[i]->Synchronize();
  group.members[parts - 1]->Enqueue(group.exchanges[parts - 1], 0);  // does not wait any more
  bool ok = !ExchangeFailure().empty();
  for (const auto& member : group.members) ok &= member->Results()[0] == 0x7fff;
  std::printf("expected failure: %s\n", TakeExchangeFailure().c_str());
  ok &= ExchangeFailure().empty() && IsCorrect(parts, 1, kLength);
  if (!ok) std::printf("WRONG  %d GPUs of which one sends nothing\n", parts);
  return ok;
}

// Median microseconds of a normalization in a graph.
float Time(const std::vector<std::unique_ptr<Member>>& members,
           const std::vector<Exchange>& exchanges) {
  std::vector<cudaEvent_t> begins, ends;
  for (size_t i = 0; i < members.size(); ++i) {
    members[i]->Capture(exchanges[i]);
    for (auto* events : {&begins, &ends}) {
      events->emplace_back();
      Check(cudaEventCreate(&events->back()), "cudaEventCreate");
    }
  }
  std::vector<float> times;
  for (int repeat = 0; repeat < 2 * kRepeats; ++repeat) {
    for (size_t i = 0; i < members.size(); ++i) members[i]->Replay(begins[i], ends[i]);
    float least = 1e9f;  // of the GPU that started last
    for (size_t i = 0; i < members.size(); ++i) {
      float milliseconds = 0;
      members[i]->Synchronize();
      Check(cudaEventElapsedTime(&milliseconds, begins[i], ends[i]), "cudaEventElapsedTime");
      least = std::min(least, milliseconds);
    }
    if (repeat >= kRepeats) times.push_back(1e3f * least / kRounds);
  }
  for (size_t i = 0; i < members.size(); ++i) {
    members[i]->Use();
    Check(cudaEventDestroy(begins[i]), "cudaEventDestroy");
    Check(cudaEventDestroy(ends[i]), "cudaEventDestroy");
  }
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

// Numbers of GPUs up to `most`, with kernels loaded.
std::vector<int> Groups(int most) {
  int count = 0;
  Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  most = std::min({most, count, kMaxExchangeParts});
  for (int device = 0; device < most; ++device) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(PrepareKernels(device), "PrepareKernels");
  }
  std::vector<int> groups;
  for (int parts = 2; parts <= most; parts = parts < 4 ? parts + 1 : parts + 2) {
    groups.push_back(parts);
  }
  return groups;
}

}  // namespace

std::pair<int, int> CheckExchange(int most) {
  int correct = 0, wrong = 0;
  const auto add = [&](bool ok) { ++(ok ? correct : wrong); };
  for (int parts : Groups(most)) {
    for (int64_t columns : kColumns) {
      for (int64_t rows : kRows) add(IsCorrect(parts, rows, columns));
      add(IsCorrect(parts, 1, columns));  // after more rows
    }
    add(StopsInTime(parts));
    std::printf("%d GPUs: %d passed so far, %d failed\n", parts, correct, wrong);
  }
  return {correct, wrong};
}

void TimeExchange(int most) {
  for (int parts : Groups(most)) {
    for (int64_t columns : kTimedColumns) {
      for (int64_t rows : kRows) {
        Group group(parts, rows, columns, 1);
        std::vector<std::unique_ptr<Member>> alone;
        alone.push_back(std::make_unique<Member>(0, 0, 0, rows, columns, 1));
        const float with = Time(group.members, group.exchanges);
        const float without = Time(alone, {Exchange()});
        std::printf(
            "%d GPUs, %2lld rows of %lld: %6.2f us, without an exchange %5.2f us: %6.2f us\n",
            parts, static_cast<long long>(rows), static_cast<long long>(columns), with, without,
            with - without);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace jaxlowbit::check
