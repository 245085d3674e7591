// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler: cuts a call into tasks and hands them to XLA's thread pool.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

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
      : matmul(operands.problem, operands.buffers, clone),
        num_threads(std::clamp<int64_t>(matmul.num_tasks(), 1, max_threads)),
        scratch(num_threads * matmul.scratch_lines()),
        done(std::max<int64_t>(matmul.num_tasks(), 1)) {}

  void RunTasks(int64_t thread) {
    CacheLine* lines = scratch.data() + thread * matmul.scratch_lines();
    int64_t task;
    while ((task = next_task.fetch_add(1, std::memory_order_relaxed)) < matmul.num_tasks()) {
      matmul.Run(task, lines);
      done.CountDown();
    }
  }

  CpuMatmul matmul;
  int64_t num_threads;
  std::vector<CacheLine> scratch;  // [num_threads][scratch_lines]
  std::atomic<int64_t> next_task{0};
  ffi::CountDownPromise done;
};

ffi::Future Completed(const ffi::Error& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  error.success() ? promise.SetAvailable() : promise.SetError(error);
  return future;
}

ffi::Future Execute(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                    ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                    ffi::Result<ffi::AnyBuffer> out, int64_t bits, int64_t group_size,
                    bool transposed, bool scale_sums, bool half_sums) {
  Operands operands;
  const ffi::Error error =
      DecodeOperands(lhs, {packed, scale, zero, index}, *out,
                     {bits, group_size, transposed, scale_sums, half_sums}, &operands);
  if (error.failure()) return Completed(error);
  if (transposed) {
    return Completed(Refuse("the CPU kernel has no transposed product; it runs as plain XLA."));
  }
  const QuantizedMatmul& p = operands.problem;
  if (p.batch == 0 || p.m == 0) return Completed(ffi::Error::Success());

  static const CpuClone& clone = *RunnableCpuClones().front();
  const int64_t useful_threads = 1 + p.batch * p.m * p.n * p.k / kMultiplicationsPerThread;
  const auto call = std::make_shared<SharedCall>(
      operands, clone, std::clamp<int64_t>(pool.num_threads(), 1, useful_threads));
  ffi::Future future(call->done);
  for (int64_t thread = 1; thread < call->num_threads; ++thread) {
    pool.Schedule([call, thread] { call->RunTasks(thread); });
  }
  call->RunTasks(0);
  return future;
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
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size")
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("scale_sums")
                                  .Attr<bool>("half_sums"));
