// SPDX-License-Identifier: Apache-2.0

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "cuda/check/check_sending.h"
#include "cuda/check/device_problem.h"
#include "cuda/launch.h"
#include "cuda/ops/exchange.h"
#include "cuda/ops/rms_norm.h"
#include "cuda/plan.h"

namespace jaxlowbit::check {
namespace {

constexpr int kCheckedRounds = 7;
constexpr int kTimedRounds = 24;
constexpr int kReplays = 15;
constexpr int64_t kDelay = 100000;  // clocks
const std::vector<int64_t> kRows = {1, 2, 7, 8, 16, 29, 32};
constexpr int64_t kSentRows = 16;  // products of up to so many rows always send

// One GPU has room for all kernels of several devices that wait for each other, with few rows and columns.
struct OneGpuRoom {
  int devices;
  std::vector<int64_t> columns;
};
const std::vector<OneGpuRoom> kRoomOfOneGpu = {
    {2, {64, 576, 1024}}, {3, {64, 576, 1024}}, {4, {64, 256}}};
constexpr int64_t kRowsOfOneGpu = 64;  // of all devices
const std::vector<int64_t> kColumns = {64, 576, 4096, 8192, 12288};

// Columns and k of the layers of Llama 3 8B and 70B: output projections, then down. A device has a part of k.
const std::vector<std::pair<int64_t, int64_t>> kTimedLayers = {
    {4096, 4096}, {4096, 14336}, {8192, 8192}, {8192, 28672}};

__global__ void Wait(int64_t clocks) {
  const int64_t start = clock64();
  while (clock64() - start < clocks) {
  }
}

// A product of one device, with weights for each round.
class Product {
 public:
  Product(int device, const QuantizedMatmul& problem, bool holds_next, const Inboxes& inboxes,
          int rounds, uint64_t seed)
      : problem_(problem), data_(problem, {}, rounds, seed) {
    PlannedProduct product = {problem, {}};
    int number = 0;
#define JAXLOWBIT_BUFFER(type, name)                                        \
  if (data_.buffers(0).name != nullptr) product.buffers.name = {number, 0}; \
  ++number;
#include "cuda/buffers.def"
    std::vector<PlannedStep> steps;
    Ways typical(nullptr);
    const Room room = {product.buffers.workspace, data_.workspace_bytes()};
    PlanProducts({product}, {&DeviceInfo(device), nullptr}, room, &typical, &steps);
    is_stream_ = steps.size() == 1 && CanHoldNext(steps[0]);
    if (!is_stream_) return;
    Check(LoadSteps(steps, DeviceInfo(device), &plain_), "LoadSteps");
    steps[0].problem.divided = true;
    steps[0].holds_next = holds_next;
    steps[0].inboxes = inboxes;
    Check(LoadSteps(steps, DeviceInfo(device), &sending_), "LoadSteps");
  }

  // Whether it is one launch of qmm_sm90_stream.
  bool is_stream() const { return is_stream_; }
  const void* out() const { return data_.buffers(0).out; }

  void Run(int round, cudaStream_t stream) const { Run(*sending_[0], round, stream); }

  // The result, which is not sent.
  std::vector<float> Result(int round, cudaStream_t stream) const {
    Run(*plain_[0], round, stream);
    std::vector<float> result(problem_.m * problem_.n);
    Check(cudaMemcpyAsync(result.data(), data_.buffers(round).out, result.size() * 4,
                          cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(stream), "product");
    return result;
  }

 private:
  void Run(const LoadedStep& step, int round, cudaStream_t stream) const {
    const Buffers buffers = data_.buffers(round);
    std::vector<void*> pointers;
#define JAXLOWBIT_BUFFER(type, name) \
  pointers.push_back(const_cast<void*>(static_cast<const void*>(buffers.name)));
#include "cuda/buffers.def"
    Check(step.Run(pointers.data(), stream), "product");
  }

  const QuantizedMatmul problem_;
  const DeviceProblem data_;
  bool is_stream_ = false;
  std::vector<std::unique_ptr<const LoadedStep>> plain_, sending_;
};

QuantizedMatmul ProblemOf(int64_t rows, int64_t n, int64_t k, ElementType out) {
  QuantizedMatmul problem;
  problem.m = rows, problem.n = n, problem.k = k;
  problem.group_size = 128;
  problem.out = out;
  problem.pdl = true;
  return problem;
}

// Inboxes and counters of all devices, on GPU 0.
struct OneGpu {
  OneGpu(int parts, int64_t columns) {
    Exchange all;
    all.parts = parts;
    all.row_pieces = RowPieces(columns);
    Check(cudaHostAlloc(&all.failure, sizeof(uint32_t), cudaHostAllocMapped), "cudaHostAlloc");
    *all.failure = 0;
    for (int i = 0; i < parts; ++i) {
      memory.emplace_back(InboxBytes(parts, all.row_pieces));
      all.of[i] = memory.back().data();
      Check(cudaMemset(all.of[i], 0xff, memory.back().bytes()), "cudaMemset");
      memory.emplace_back(int64_t{sizeof(ExchangeState)});
      all.states[i] = static_cast<ExchangeState*>(memory.back().data());
      Check(cudaMemset(all.states[i], 0, sizeof(ExchangeState)), "cudaMemset");
    }
    Check(cudaDeviceSynchronize(), "cudaMemset");
    exchanges.assign(parts, all);
    for (int i = 0; i < parts; ++i) {
      exchanges[i].rank = i;
      exchanges[i].rounds = all.states[i]->rounds[0];
    }
  }
  ~OneGpu() { cudaFreeHost(exchanges[0].failure); }

  std::vector<DeviceBuffer> memory;
  std::vector<Exchange> exchanges;
};

// A layer's part: product of `columns` by k, product of k by `columns` with partial sums, normalization.
struct Layer {
  int64_t rows, columns, k;
  int rounds;  // each with other weights
  bool sends;  // the product, not the normalization
};

// A device's layers.
class Member {
 public:
  Member(int device, const Exchange& exchange, const Layer& layer)
      : device_(Use(device)),
        exchange_(exchange),
        layer_(layer),
        before_(device, ProblemOf(layer.rows, layer.k, layer.columns, ElementType::kBf16),
                layer.sends, {}, layer.rounds, 100 + exchange.rank),
        adds_(device, ProblemOf(layer.rows, layer.columns, layer.k, ElementType::kF32), false,
              layer.sends ? static_cast<const Inboxes&>(exchange) : Inboxes(), layer.rounds,
              1 + exchange.rank),
        x_(layer.rows * layer.columns * 2),
        scale_(layer.columns * 2),
        addend_(layer.rows * layer.columns * 4),
        sums_(layer.rounds * x_.bytes()),
        outs_(layer.rounds * x_.bytes()) {
    // Bits of small numbers of bf16.
    std::vector<uint16_t> bits(layer.rows * layer.columns);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(0x3f00 + i * 37 % 300);
    Check(cudaMemcpy(x_.data(), bits.data(), x_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    Check(cudaMemcpy(scale_.data(), bits.data(), scale_.bytes(), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    Wait<<<1, 1, 0, stream_>>>(1);  // loads it
    Check(cudaDeviceSynchronize(), "Wait");
  }
  Member(const Member&) = delete;
  ~Member() {
    Use(device_);
    if (graph_ != nullptr) {
      cudaGraphExecDestroy(graph_);
      cudaEventDestroy(begin_);
      cudaEventDestroy(end_);
    }
    cudaStreamDestroy(stream_);
  }

  bool can_send() const { return before_.is_stream() && adds_.is_stream(); }

  void Enqueue(int round, bool late) const {
    Use(device_);
    if (late) Wait<<<1, 1, 0, stream_>>>(kDelay);
    before_.Run(round, stream_);
    adds_.Run(round, stream_);
    Normalize(round, exchange_, layer_.sends ? nullptr : adds_.out());
  }

  std::vector<float> Part(int round) const {
    Use(device_);
    return adds_.Result(round, stream_);
  }

  // All sums, then all normalized rows.
  std::vector<uint16_t> Results() const {
    Use(device_);
    Check(cudaStreamSynchronize(stream_), "normalization");
    const int64_t bytes = sums_.bytes();
    std::vector<uint16_t> results(bytes);
    Check(cudaMemcpy(results.data(), sums_.data(), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    Check(cudaMemcpy(results.data() + bytes / 2, outs_.data(), bytes, cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return results;
  }

  // All rounds as a graph.
  void Capture() {
    Use(device_);
    cudaGraph_t graph;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int round = 0; round < layer_.rounds; ++round) Enqueue(round, false);
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    for (cudaEvent_t* event : {&begin_, &end_}) Check(cudaEventCreate(event), "cudaEventCreate");
  }
  void Replay() const {
    Use(device_);
    Check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    Check(cudaEventRecord(end_, stream_), "cudaEventRecord");
  }
  // Microseconds of a round of the last replay.
  float Microseconds() const {
    Use(device_);
    float milliseconds = 0;
    Check(cudaEventSynchronize(end_), "layers");
    Check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return 1e3f * milliseconds / static_cast<float>(layer_.rounds);
  }

  // Normalizes a round with these sums of all devices.
  void NormalizeAlone(int round, const std::vector<float>& parts) const {
    Use(device_);
    Check(cudaMemcpyAsync(addend_.data(), parts.data(), addend_.bytes(), cudaMemcpyHostToDevice,
                          stream_),
          "cudaMemcpyAsync");
    Normalize(round, {}, addend_.data());
    Check(cudaStreamSynchronize(stream_), "normalization");
  }

 private:
  static int Use(int device) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    return device;
  }

  // `addend`: partial sums that are not sent, or null.
  void Normalize(int round, const Exchange& exchange, const void* addend) const {
    const int64_t at = round * x_.bytes();
    RmsNorm norm = {ElementType::kBf16,
                    ElementType::kBf16,
                    ElementType::kF32,
                    layer_.rows,
                    layer_.columns,
                    x_.data(),
                    addend,
                    scale_.data(),
                    static_cast<char*>(sums_.data()) + at,
                    static_cast<char*>(outs_.data()) + at,
                    1e-5f,
                    exchange};
    norm.sent = addend == nullptr;
    Check(LaunchRmsNorm(norm, DeviceInfo(device_), stream_), "LaunchRmsNorm");
  }

  const int device_;
  const Exchange exchange_;
  const Layer layer_;
  const Product before_, adds_;
  const DeviceBuffer x_, scale_, addend_, sums_, outs_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// A member on each device, and the memory that they share.
struct Group {
  Group(int parts, bool one_gpu, const Layer& layer) {
    if (one_gpu) shared = std::make_unique<OneGpu>(parts, layer.columns);
    std::vector<int> devices(parts);
    std::iota(devices.begin(), devices.end(), 0);
    for (int i = 0; i < parts; ++i) {
      Exchange exchange;
      if (one_gpu) {
        exchange = shared->exchanges[i];
      } else {
        Check(FindExchange(devices, i, layer.columns, &exchange), "FindExchange");
      }
      members.push_back(std::make_unique<Member>(one_gpu ? 0 : i, exchange, layer));
    }
  }
  bool can_send() const {
    return std::all_of(members.begin(), members.end(), [](const auto& m) { return m->can_send(); });
  }

  std::unique_ptr<OneGpu> shared;
  std::vector<std::unique_ptr<Member>> members;
};

// Whether all devices get the bits that one gets from the sums.
bool IsCorrect(const Group& group, int64_t rows, int64_t columns) {
  const auto& members = group.members;
  for (int round = 0; round < kCheckedRounds; ++round) {
    for (size_t i = 0; i < members.size(); ++i) members[i]->Enqueue(round, (round + i) % 3 == 0);
  }
  std::vector<std::vector<uint16_t>> found;
  for (const auto& member : members) found.push_back(member->Results());
  for (int round = 0; round < kCheckedRounds; ++round) {
    std::vector<float> sums(rows * columns);
    for (const auto& member : members) {
      const std::vector<float> part = member->Part(round);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += part[i];
    }
    members[0]->NormalizeAlone(round, sums);
  }
  const std::vector<uint16_t> expected = members[0]->Results();
  for (size_t i = 0; i < members.size(); ++i) {
    if (found[i] == expected) continue;
    const auto differs =
        std::mismatch(found[i].begin(), found[i].end(), expected.begin()).first - found[i].begin();
    std::printf("WRONG  adding %lld rows of %lld: device %zu of %zu, element %lld\n",
                static_cast<long long>(rows), static_cast<long long>(columns), i, members.size(),
                static_cast<long long>(differs));
    return false;
  }
  return true;
}

// Median microseconds of a layer.
float Time(const std::vector<std::unique_ptr<Member>>& members) {
  for (const auto& member : members) member->Capture();
  std::vector<float> times;
  for (int replay = 0; replay < 2 * kReplays; ++replay) {
    for (const auto& member : members) member->Replay();
    float least = 1e9f;  // of the device that started last
    for (const auto& member : members) least = std::min(least, member->Microseconds());
    if (replay >= kReplays) times.push_back(least);
  }
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

}  // namespace

std::pair<int, int> CheckSending(int most) {
  if (DeviceInfo(0).compute_capability != 90) return {0, 0};
  int count = 0, correct = 0, wrong = 0;
  Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  count = std::min({count, most, kMaxExchangeParts});
  // `sends`: the products, not the normalization.
  const auto check = [&](int parts, bool one_gpu, bool sends, int64_t rows, int64_t columns) {
    const Group group(parts, one_gpu, {rows, columns, 512, kCheckedRounds, sends});
    if (!group.can_send() && rows > kSentRows) return;  // another kernel is faster
    ++(group.can_send() && IsCorrect(group, rows, columns) ? correct : wrong);
  };
  for (const auto& [parts, all_columns] : kRoomOfOneGpu) {
    for (int64_t columns : all_columns) {
      for (int64_t rows : kRows) {
        if (parts * rows > kRowsOfOneGpu) continue;
        for (bool sends : {false, true}) check(parts, true, sends, rows, columns);
      }
    }
    std::printf("%d devices that are GPU 0: %d passed so far, %d failed\n", parts, correct, wrong);
  }
  for (int device = 1; device < count; ++device) Check(PrepareKernels(device), "PrepareKernels");
  for (int parts = 2; parts <= count; parts *= 2) {
    for (int64_t columns : kColumns) {
      for (int64_t rows : kRows) check(parts, false, true, rows, columns);
    }
    std::printf("products of %d GPUs: %d passed so far, %d failed\n", parts, correct, wrong);
  }
  Check(cudaSetDevice(0), "cudaSetDevice");
  return {correct, wrong};
}

void TimeSending() {
  int count = 0;
  Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (DeviceInfo(0).compute_capability != 90) return;
  for (int parts = 2; parts <= std::min(count, kMaxExchangeParts); parts *= 2) {
    for (const auto& [columns, all_k] : kTimedLayers) {
      for (int64_t rows : {1, 4, 16}) {
        const int64_t k = all_k / parts;
        float times[2];
        for (bool sends : {false, true}) {
          times[sends] = Time(Group(parts, false, {rows, columns, k, kTimedRounds, sends}).members);
        }
        std::vector<std::unique_ptr<Member>> alone;
        alone.push_back(
            std::make_unique<Member>(0, Exchange(), Layer{rows, columns, k, kTimedRounds, false}));
        std::printf(
            "%d GPUs, %2lld rows, products %lld x %lld and back: the normalization sends %7.2f us, "
            "the product %7.2f, without an exchange %7.2f\n",
            parts, static_cast<long long>(rows), static_cast<long long>(columns),
            static_cast<long long>(k), times[0], times[1], Time(alone));
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace jaxlowbit::check
