// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/check/time_walk.h"
#include "cuda/check/walk_hops.h"
#include "cuda/check/walk_model.h"

namespace jaxlowbit::check {
namespace {

using sm90_stream::kNumWalkStamps;
using sm90_stream::kStampStart;
using sm90_stream::kStampStored;
using sm90_stream::kWalkStamps;
using sm90_stream::kWalkSteps;
using sm90_stream::WalkGrid;
using sm90_stream::WalkOptions;
using sm90_stream::WalkShape;

constexpr WalkShape kModel8b = {4096, 6144, 14336, 32, 1};
constexpr WalkShape kModel70b = {8192, 10240, 28672, 80, 1};
constexpr double kGoMicroseconds = 42;  // of a layer of 8B, on an H100

struct Command {
  WalkShape shape = kModel8b;
  WalkOptions options;
  bool sweep = false, stamps = false, hops = false;
  int launches = 15;
};

[[noreturn]] void Usage(const std::string& message) {
  std::fprintf(stderr, "driver walk: %s; options are in cuda/check/time_walk.h\n", message.c_str());
  std::exit(2);
}

Command Parse(int argc, char** argv) {
  Command command;
  for (int i = 2; i < argc; ++i) {  // the model first: other options change it
    if (std::strcmp(argv[i], "--model") != 0 || i + 1 == argc) continue;
    const std::string name = argv[i + 1];
    if (name != "8b" && name != "70b") Usage("unknown model " + name);
    if (name == "70b") command.shape = kModel70b;
  }
  for (int i = 2; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--sweep") {
      command.sweep = true;
    } else if (flag == "--stamps") {
      command.stamps = true;
    } else if (flag == "--hops") {
      command.hops = true;
    } else if (i + 1 == argc) {
      Usage("unknown or incomplete option " + flag);
    } else {
      const int value = std::atoi(argv[++i]);
      WalkOptions& o = command.options;
      int* const place = flag == "--layers"     ? &command.shape.layers
                         : flag == "--rows"     ? &command.shape.rows
                         : flag == "--groups"   ? &o.groups
                         : flag == "--flight"   ? &o.flight
                         : flag == "--slack"    ? &o.slack
                         : flag == "--sleep"    ? &o.sleep
                         : flag == "--pages"    ? &o.pages
                         : flag == "--launches" ? &command.launches
                                                : nullptr;
      if (place != nullptr) {
        *place = value;
      } else if (flag != "--model") {
        Usage("unknown option " + flag);
      }
    }
  }
  return command;
}

__global__ void Delay(int64_t clocks) {
  const int64_t start = clock64();
  while (clock64() - start < clocks) {
  }
}

WalkGrid GridOf(const WalkModel& model, const WalkOptions& options, bool stamps) {
  WalkGrid grid;
  Check(FindWalkGrid(model.shape(), options, stamps, &grid), "FindWalkGrid");
  return grid;
}

void Launch(const WalkModel& model, const WalkOptions& options, const WalkGrid& grid, bool trace,
            unsigned long long* stamps) {
  Check(LaunchWalk(model.shape(), model.buffers(trace, stamps), options, grid, nullptr),
        "LaunchWalk");
}

// Exits if a wait did not end.
void ExitOnError(const WalkModel& model) {
  Check(cudaDeviceSynchronize(), "walk");
  const unsigned long long error = model.Error();
  if (error == 0) return;
  constexpr const char* kWaits[] = {
      "?",    "a slot",  "arriving pages", "a page",  "free partial sums",
      "rows", "a count", "partial sums",   "residual"};
  const int what = static_cast<int>(error & 255), step = static_cast<int>(error >> 8 & 0xffffff);
  std::printf("WRONG  walk: CTA %d waited for %s in step %d of layer %d\n",
              static_cast<int>(error >> 32), kWaits[what < 9 ? what : 0], step % kWalkSteps,
              step / kWalkSteps);
  std::exit(1);
}

// Whether a launch may be cooperative and have clusters. CTAs are resident anyway if nothing else runs.
bool MayCooperate(WalkModel& model, const WalkOptions& options, const WalkGrid& grid) {
  model.Start();
  const cudaError_t error =
      LaunchWalk(model.shape(), model.buffers(false, nullptr), options, grid, nullptr);
  std::printf("cooperative launch of clusters: %s\n", cudaGetErrorString(error));
  if (error != cudaSuccess) (void)cudaGetLastError();
  ExitOnError(model);
  return error == cudaSuccess;
}

// Checks two launches, the second of which continues the first, and that both repeat bit for bit.
bool IsCorrect(WalkModel& model, WalkOptions options) {
  const WalkGrid grid = GridOf(model, options, false);
  uint64_t digests[2][2];
  double worst = 0;
  for (int run = 0; run < 2; ++run) {
    model.Start();
    for (int launch = 0; launch < 2; ++launch) {
      options.epoch = static_cast<uint32_t>(2 + launch * model.shape().layers);
      Launch(model, options, grid, true, nullptr);
      ExitOnError(model);
      digests[run][launch] = model.Digest();
      if (run == 0) worst = std::max(worst, model.ErrorOverBound(launch > 0));
    }
  }
  const bool repeats = digests[0][0] == digests[1][0] && digests[0][1] == digests[1][1];
  const bool ok = worst <= 1 && repeats;
  std::printf("%s  walk of %d groups of warps, slack %d: error over bound %.3g, %s\n",
              ok ? "correct" : "WRONG", options.groups, options.slack, worst,
              repeats ? "two runs are equal" : "two runs differ");
  std::fflush(stdout);
  return ok;
}

// Median microseconds of a layer.
double Time(WalkModel& model, const WalkOptions& options, int launches) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  const WalkGrid grid = GridOf(model, options, false);
  std::vector<float> times;
  for (int i = 0; i < launches + 3; ++i) {
    model.Start();
    Delay<<<1, 1>>>(200000);  // until the launch is enqueued
    Check(cudaEventRecord(begin), "cudaEventRecord");
    Launch(model, options, grid, false, nullptr);
    Check(cudaEventRecord(end), "cudaEventRecord");
    ExitOnError(model);
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (i >= 3) times.push_back(milliseconds);
  }
  Check(cudaEventDestroy(begin), "cudaEventDestroy");
  Check(cudaEventDestroy(end), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  return 1e3 * times[times.size() / 2] / model.shape().layers;
}

// Times the walk, and the walk without what bounds it.
void TimeParts(WalkModel& model, const WalkOptions& options, const WalkGrid& grid, int launches) {
  const auto with = [&](bool loads, bool waits) {
    WalkOptions o = options;
    o.loads = loads;
    o.waits = waits;
    return Time(model, o, launches);
  };
  const double all = with(true, true), stream = with(true, false);
  const double waits = with(false, true), neither = with(false, false);
  const double kilobytes = static_cast<double>(model.layer_bytes()) / (2e3 * grid.clusters);
  std::printf(
      "us a layer: %.2f; without waits for activations %.2f; without loads %.2f; without "
      "both %.2f\n",
      all, stream, waits, neither);
  std::printf("  read %.3f TB/s, without waits %.3f; c = %.1f KB/us a SM; a hop %.2f us\n",
              static_cast<double>(model.layer_bytes()) / all / 1e6,
              static_cast<double>(model.layer_bytes()) / stream / 1e6, kilobytes / neither,
              (waits - neither) / kWalkSteps);
  WalkOptions counted = options, probed = options, fewer = options;
  counted.slack = 0;
  probed.slack = -2;
  fewer.groups = 1;
  WalkGrid other;
  const bool has_fewer = FindWalkGrid(model.shape(), fewer, false, &other) == cudaSuccess;
  std::printf("  first a counter %.2f us; first one entry %.2f us; 8 consumer warps %.2f us\n",
              Time(model, counted, launches), Time(model, probed, launches),
              has_fewer ? Time(model, fewer, launches) : 0.0);
  const WalkShape& shape = model.shape();
  if (shape.width == kModel8b.width && shape.mlp == kModel8b.mlp) {
    std::printf("  %s (%.2f of at most %.0f us a layer on an H100)\n",
                all <= kGoMicroseconds ? "GO" : "NO GO", all, kGoMicroseconds);
  }
  std::fflush(stdout);
}

// Times of a CTA's stamps in nanoseconds, from its clock and the two ticks of the global timer.
class Clocks {
 public:
  Clocks(const unsigned long long* stamps, int steps)
      : stamps_(stamps), first_(stamps + steps * kWalkStamps), last_(first_ + kWalkStamps) {}

  bool Has(int step) const { return At(step, kStampStart) != 0; }
  double Nanoseconds(int step, int stamp) const {
    const double per_clock =
        static_cast<double>(last_[0] - first_[0]) / static_cast<double>(last_[1] - first_[1]);
    return static_cast<double>(first_[0]) +
           static_cast<double>(static_cast<long long>(At(step, stamp) - first_[1])) * per_clock;
  }

 private:
  unsigned long long At(int step, int stamp) const { return stamps_[step * kWalkStamps + stamp]; }

  const unsigned long long *stamps_, *first_, *last_;
};

// Means over the layers, relative to the last store of the step before.
struct StepTimes {
  double mean[kWalkStamps] = {}, last[kWalkStamps] = {};
};

StepTimes TimesOf(const std::vector<Clocks>& ctas, int step, int layers) {
  StepTimes times;
  for (int layer = 1; layer < layers; ++layer) {
    const int number = layer * kWalkSteps + step;
    double before = 0;
    for (const Clocks& cta : ctas) {
      if (cta.Has(number - 1)) before = std::max(before, cta.Nanoseconds(number - 1, kStampStored));
    }
    for (int stamp = 0; stamp < kNumWalkStamps; ++stamp) {
      double sum = 0, last = -1e9;
      int count = 0;
      for (const Clocks& cta : ctas) {
        if (!cta.Has(number)) continue;
        const double time = (cta.Nanoseconds(number, stamp) - before) / 1e3;
        sum += time;
        last = std::max(last, time);
        ++count;
      }
      times.mean[stamp] += sum / std::max(count, 1) / (layers - 1);
      times.last[stamp] += last / (layers - 1);
    }
  }
  return times;
}

void PrintStamps(WalkModel& model, const WalkOptions& options) {
  const WalkGrid grid = GridOf(model, options, true);
  const int layers = model.shape().layers, steps = layers * kWalkSteps;
  if (layers < 2) return;
  const int64_t count = int64_t{grid.clusters} * 2 * (steps + 2) * kWalkStamps;
  DeviceBuffer stamps(count * 8);
  for (int run = 0; run < 2; ++run) {
    Check(cudaMemset(stamps.data(), 0, stamps.bytes()), "cudaMemset");
    model.Start();
    Launch(model, options, grid, false, static_cast<unsigned long long*>(stamps.data()));
    ExitOnError(model);
  }
  std::vector<unsigned long long> values(static_cast<size_t>(count));
  Check(cudaMemcpy(values.data(), stamps.data(), stamps.bytes(), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  std::vector<Clocks> ctas;
  for (int cta = 0; cta < 2 * grid.clusters; ++cta) {
    ctas.emplace_back(values.data() + int64_t{cta} * (steps + 2) * kWalkStamps, steps);
  }
  StepTimes times[kWalkSteps];
  for (int step = 0; step < kWalkSteps; ++step) times[step] = TimesOf(ctas, step, layers);
  constexpr const char* kNames[kNumWalkStamps] = {
      "step begins",     "entries seen",     "all warps there",
      "rows there",      "first page there", "first page done",
      "first unit done", "first unit sent",  "all multiplied",
      "all sent",        "collector waits",  "partial sums there",
      "stored"};
  std::printf("us after the last store of the step before, mean / last CTA:\n%-20s%s\n", "",
              "      o               gate, up        down            q, k, v");
  for (int stamp = 0; stamp < kNumWalkStamps; ++stamp) {
    std::printf("%-20s", kNames[stamp]);
    for (const StepTimes& t : times) std::printf("%7.2f /%6.2f ", t.mean[stamp], t.last[stamp]);
    std::printf("\n");
  }
  std::fflush(stdout);
}

void Sweep(WalkModel& model, const WalkOptions& options, int launches) {
  const auto print = [&](const WalkOptions& o) {
    WalkGrid grid;
    if (FindWalkGrid(model.shape(), o, false, &grid) != cudaSuccess) return;
    std::printf("groups %d, in flight %2d of %2d pages, slack %3d, sleep %3d: %6.2f us a layer\n",
                o.groups, o.flight, grid.pages, o.slack, o.sleep, Time(model, o, launches));
    std::fflush(stdout);
  };
  for (int groups = 1; groups <= 2; ++groups) {
    for (int flight : {2, 3, 4, 5, 6, 8, 16}) {
      WalkOptions o = options;
      o.groups = groups;
      o.flight = flight;
      print(o);
    }
  }
  for (const auto& [slack, sleep] : std::vector<std::pair<int, int>>{{-2, 0},
                                                                     {-2, 50},
                                                                     {-1, 0},
                                                                     {-1, 50},
                                                                     {-1, 100},
                                                                     {-1, 300},
                                                                     {0, 0},
                                                                     {8, 0},
                                                                     {32, 0},
                                                                     {32, 100},
                                                                     {64, 0}}) {
    WalkOptions o = options;
    o.slack = slack;
    o.sleep = sleep;
    print(o);
  }
}

}  // namespace

int Walk(int argc, char** argv) {
  const Command command = Parse(argc, argv);
  WalkOptions options = command.options;
  TimeHops();
  if (command.hops) return 0;
  WalkModel model(command.shape);
  const WalkGrid grid = GridOf(model, options, false);
  options.cooperative = MayCooperate(model, options, grid);
  std::printf(
      "%d layers, %d rows, %.1f MB a layer; %d clusters of 2, %d pages, %d bytes of shared "
      "memory, %d registers\n",
      command.shape.layers, command.shape.rows, static_cast<double>(model.layer_bytes()) / 1e6,
      grid.clusters, grid.pages, grid.shared_bytes, grid.registers);
  std::fflush(stdout);
  for (int groups = 1; groups <= 2; ++groups) {
    for (int slack : {0, -1, -2}) {
      WalkOptions o = options;
      o.groups = groups;
      o.slack = slack;
      WalkGrid other;
      if (FindWalkGrid(command.shape, o, false, &other) != cudaSuccess) continue;
      if (!IsCorrect(model, o)) return 1;
    }
  }
  TimeParts(model, options, grid, command.launches);
  if (command.stamps) PrintStamps(model, options);
  if (command.sweep) Sweep(model, options, std::min(command.launches, 7));
  return 0;
}

}  // namespace jaxlowbit::check
