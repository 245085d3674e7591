// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers of a call (call.h): a sequence of steps, or several of them (layers.h). Every kernel but the first of
// the call uses PDL, which survives graph capture only within one handler (cuda/kernels/launch_config.h): a call never
// writes weights, and results of earlier calls are complete when its first kernel starts. Execute only enqueues, so XLA
// may capture it.
//
// XLA instantiates the calls of a program one after the other when the program is compiled or loaded. Instantiate
// starts to compile kernels without waiting, so that the kernels of all calls compile concurrently.
//
// Attribute `epsilon`, f32: for the normalize steps. Attribute `devices`, s64[]: CUDA ordinals of the devices that
// share a decode step; each has some of the heads and hidden features, and normalizations add float32 parts over the
// devices (cuda/ops/exchange.h). Absent for one device. Attribute `follows`, pred: an inner call precedes this one, so
// the first kernel uses PDL, too.
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda/launch.h"
#include "cuda/ops/exchange.h"
#include "xla_ffi/call.h"
#include "xla_ffi/cuda_error.h"
#include "xla_ffi/cuda_plan.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/layers.h"
#include "xla_ffi/plan_cache.h"

namespace jaxlowbit {
namespace {

constexpr size_t kMaxCalls = 4096;

std::atomic<int64_t> execute_count{0};

PlanCache<LoadedCall>& plans = *new PlanCache<LoadedCall>(kMaxCalls);

// Handlers run in two stages with the same operands: Initialize, outside of graph capture and before every execution,
// loads the kernels that Execute will launch. It may get other buffers than Execute, so it plans for typical ones.
enum class Stage { kInitialize, kExecute };

// Plans a call that has no plan yet.
ffi::Error Plan(const CallKey& key, Call* call, const Target& target, Stage stage,
                std::shared_ptr<const LoadedCall>* planned) {
  const bool typical = stage == Stage::kInitialize;
  auto loaded = std::make_shared<LoadedCall>();
  Ways ways(typical ? nullptr : key.pointers.data());
  const ffi::Error error = PlanCall(call, target, &ways, loaded.get());
  if (error.failure()) return error;
  plans.Keep(key, ways.questions(), typical, loaded);
  *planned = std::move(loaded);
  return error;
}

template <Stage kStage>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
               RawAttributes attributes) {
  constexpr bool kExecutes = kStage == Stage::kExecute;
  const auto named = [&](const ffi::Error& error) {
    return Named(Attributes(ffi::Dictionary(attributes.attrs)).caller(), error);
  };
  try {
    int ordinal = 0;
    Target target;
    cudaError_t status = FindTarget(stream, !kExecutes, &ordinal, &target);
    if (status != cudaSuccess) return named(TargetError(status, ordinal));
    thread_local CallKey key;
    key.Read(args, rets, attributes, ordinal, target.tuned == nullptr ? 0 : target.tuned->number);
    const LoadedCall* loaded = plans.Find(key, !kExecutes);
    std::shared_ptr<const LoadedCall> planned;
    if (loaded == nullptr) {
      if (const auto layers = FindLayers(attributes)) {  // never planned
        return ForEachLayer(*layers, args, rets, attributes,
                            [stream](const auto&... call) { return Run<kStage>(stream, call...); });
      }
      Call call(args, rets, ffi::Dictionary(attributes.attrs));
      const ffi::Error error = Plan(key, &call, target, kStage, &planned);
      if (error.failure()) return named(error);
      loaded = planned.get();
    }
    if (!kExecutes) {
      const std::string failure = loaded->exchanges ? ExchangeFailure() : "";
      return failure.empty() ? ffi::Error::Success() : named(ffi::Error::Internal(failure));
    }
    execute_count.fetch_add(1, std::memory_order_relaxed);
    for (const LoadedCall::Step& step : loaded->steps) {
      status = step.run->Run(key.pointers.data(), stream);
      if (status != cudaSuccess) return named(ToError(status, step.what));
    }
    return ffi::Error::Success();
  } catch (...) {
    return Thrown(Attributes(ffi::Dictionary(attributes.attrs)).caller());
  }
}

// Whether these numbers have not been seen before. Programs repeat the same calls, which need one compilation.
bool IsNew(ffi::Span<const int64_t> products, ffi::Span<const int64_t> steps, bool divided) {
  static std::mutex mutex;
  static auto& seen = *new std::set<std::vector<int64_t>>;
  std::vector<int64_t> numbers(products.begin(), products.end());
  numbers.insert(numbers.end(), steps.begin(), steps.end());
  numbers.push_back(divided);
  const std::lock_guard<std::mutex> lock(mutex);
  return seen.size() >= kMaxCalls || seen.insert(std::move(numbers)).second;
}

ffi::Error StartCompilingProducts(RawAttributes raw) {
  Attributes attributes(ffi::Dictionary(raw.attrs));
  using Integers = ffi::Span<const int64_t>;
  const auto records = attributes.Find<Integers>("products").value_or(Integers());
  const bool divided = attributes.Find<Integers>("devices").value_or(Integers()).size() > 1;
  if (!IsNew(records, attributes.Find<Integers>("steps").value_or(Integers()), divided)) {
    return ffi::Error::Success();
  }
  std::vector<Product> products;
  std::vector<Step> steps;
  const ffi::Error error = attributes.Decode(&products, &steps);
  if (error.failure()) return error;
  StartCompiling(
      [&](const Target& target) { return PlanAttributes(products, steps, divided, target); });
  return error;
}

// Ignores errors, which Initialize reports.
ffi::Error Instantiate(RawAttributes attributes) {
  const ffi::Error ignored =
      Guard("jaxlowbit", [&] { return ForEachKind(attributes, StartCompilingProducts); });
  static_cast<void>(ignored);
  return ffi::Error::Success();
}

}  // namespace

int64_t CudaExecuteCount() { return execute_count.load(std::memory_order_relaxed); }

}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaInstantiate, jaxlowbit::Instantiate,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInstantiate>()
                                  .Attrs<jaxlowbit::RawAttributes>());

// As XLA_FFI_DEFINE_HANDLER_SYMBOL defines them, but without its two functions around each handler.
extern "C" XLA_FFI_Error* JaxlowbitCudaInitialize(XLA_FFI_CallFrame* frame) {
  using namespace xla::ffi;
  static auto* const handler = Ffi::Bind<ExecutionStage::kInitialize>()
                                   .Ctx<PlatformStream<cudaStream_t>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs<jaxlowbit::RawAttributes>()
                                   .To(jaxlowbit::Run<jaxlowbit::Stage::kInitialize>)
                                   .release();
  return handler->Call(frame);
}

extern "C" XLA_FFI_Error* JaxlowbitCudaExecute(XLA_FFI_CallFrame* frame) {
  using namespace xla::ffi;
  static auto* const handler =
      Ffi::Bind<ExecutionStage::kExecute>()
          .Ctx<PlatformStream<cudaStream_t>>()
          .RemainingArgs()
          .RemainingRets()
          .Attrs<jaxlowbit::RawAttributes>()
          .To(jaxlowbit::Run<jaxlowbit::Stage::kExecute>, {Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}
