// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler of one product.
#include "cpu/qmm_cpu.h"
#include "xla_ffi/cpu_overlap.h"
#include "xla_ffi/cpu_team.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {
namespace {

void Run(ffi::ThreadPool pool, const QuantizedMatmul& p, const Buffers& buffers) {
  static const CpuClone& clone = *RunnableCpuClones().front();
  const auto permuted = AllocateLines(CpuMatmul::PermutedLines(p, clone));
  const CpuMatmul matmul(p, buffers, clone, permuted.get());
  const int64_t threads = UsefulThreads(pool, p.batch * p.m * p.n * p.k);
  const int64_t lines = matmul.scratch_lines();
  const auto scratch = AllocateLines(threads * lines);
  Team team;
  team.AddPhase(matmul.num_permute_tasks(), [&](int64_t task, int64_t) { matmul.Permute(task); });
  team.AddPhase(matmul.num_tasks(), [&](int64_t task, int64_t thread) {
    matmul.Run(task, scratch.get() + thread * lines);
  });
  team.Run(pool, threads);
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer packed,
                   ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer index,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary dictionary) {
  return Guard("quantized_matmul", [&] {
    Attributes attributes(dictionary);
    const auto product = ProductAttributes::Of(&attributes);
    Operands operands;
    ffi::Error error = attributes.Check();
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    if (error.failure()) return error;
    const QuantizedMatmul& p = operands.problem;
    if (p.transposed) {
      return Refuse("the CPU kernel has no transposed product; it runs as plain XLA.");
    }
    if (p.scale == ElementType::kSuper) return Refuse(std::string(kNoSuperBlocks));
    if (p.batch > 0 && p.m > 0) {
      RunApart(p, operands.buffers, [&](const Buffers& buffers) { Run(pool, p, buffers); });
    }
    return error;
  });
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
