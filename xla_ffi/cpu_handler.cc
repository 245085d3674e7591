// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler: cuts a call into tasks and hands them to XLA's thread pool.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/extents.h"
#include "xla_ffi/cpu/qmm_cpu.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {
namespace {

// Waking a thread costs about as much as this many multiplications.
constexpr int64_t kMultiplicationsPerThread = 1 << 18;

// What the threads of one call share. They draw tasks until none is left; the last one to finish
// a task completes the call. A thread that comes late finds no task and touches no buffer.
struct SharedCall {
  SharedCall(const Operands& operands, const CpuClone& clone, int64_t max_threads)
      : out(OutExtent(operands.problem, operands.buffers)),
        own(OverlapsOperands(operands) ? out.bytes : 0),
        matmul(operands.problem, Writing(operands.buffers), clone),
        num_threads(std::clamp<int64_t>(matmul.num_tasks(), 1, max_threads)),
        scratch(num_threads * matmul.scratch_lines()),
        left(matmul.num_tasks()),
        done(std::max<int64_t>(matmul.num_tasks(), 1)) {}

  static bool OverlapsOperands(const Operands& operands) {
    const auto& [problem, buffers] = operands;
    const auto read = OperandExtents(problem, buffers);
    const Extent written = OutExtent(problem, buffers);
    return std::any_of(read.begin(), read.end(),
                       [&](const Extent& operand) { return Overlap(written, operand); });
  }

  Buffers Writing(Buffers buffers) {
    if (!own.empty()) buffers.out = own.data();
    return buffers;
  }

  void RunTasks(int64_t thread) {
    CacheLine* lines = scratch.data() + thread * matmul.scratch_lines();
    int64_t task;
    while ((task = next_task.fetch_add(1, std::memory_order_relaxed)) < matmul.num_tasks()) {
      const ffi::Error error = Guard("quantized_matmul", [&] {
        matmul.Run(task, lines);
        return ffi::Error::Success();
      });
      const bool last = left.fetch_sub(1, std::memory_order_acq_rel) == 1;
      if (last && !own.empty()) {
        std::memcpy(const_cast<void*>(out.data), own.data(), own.size());
      }
      done.CountDown(1, error);
    }
  }

  Extent out;
  std::vector<char> own;  // where out is written until the last task, if it lies over an operand
  CpuMatmul matmul;
  int64_t num_threads;
  std::vector<CacheLine> scratch;           // [num_threads][scratch_lines]
  std::atomic<int64_t> next_task{0}, left;  // tasks
  ffi::CountDownPromise done;
};

ffi::Future Completed(const ffi::Error& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  error.success() ? promise.SetAvailable() : promise.SetError(error);
  return future;
}

// Starts the call and lets `future` wait for it; does nothing to it for an empty one.
ffi::Error Start(ffi::ThreadPool pool, const Operands& operands,
                 std::optional<ffi::Future>* future) {
  const QuantizedMatmul& p = operands.problem;
  if (p.transposed) {
    return Refuse("the CPU kernel has no transposed product; it runs as plain XLA.");
  }
  if (p.batch == 0 || p.m == 0) return ffi::Error::Success();

  static const CpuClone& clone = *RunnableCpuClones().front();
  const int64_t useful_threads = 1 + p.batch * p.m * p.n * p.k / kMultiplicationsPerThread;
  const auto call = std::make_shared<SharedCall>(
      operands, clone, std::clamp<int64_t>(pool.num_threads(), 1, useful_threads));
  future->emplace(call->done);
  for (int64_t thread = 1; thread < call->num_threads; ++thread) {
    pool.Schedule([call, thread] { call->RunTasks(thread); });
  }
  call->RunTasks(0);
  return ffi::Error::Success();
}

ffi::Future Execute(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                    ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary dictionary) {
  std::optional<ffi::Future> future;
  const ffi::Error error = Guard("quantized_matmul", [&] {
    Attributes attributes(dictionary);
    const auto product = ProductAttributes::Of(&attributes);
    Operands operands;
    ffi::Error error = attributes.Check();
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    return error.failure() ? error : Start(pool, operands, &future);
  });
  return future.has_value() ? std::move(*future) : Completed(error);
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCpuExecute, jaxlowbit::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs
                                  .Arg<xla::ffi::AnyBuffer>()  // packed
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // zero
                                  .Arg<xla::ffi::AnyBuffer>()  // index
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Attrs());
