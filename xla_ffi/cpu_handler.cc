// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler of one product.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/extents.h"
#include "xla_ffi/cpu/qmm_cpu.h"
#include "xla_ffi/cpu_team.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {
namespace {

bool OverlapsOperands(const QuantizedMatmul& problem, const Buffers& buffers) {
  const auto read = OperandExtents(problem, buffers);
  const Extent written = OutExtent(problem, buffers);
  return std::any_of(read.begin(), read.end(),
                     [&](const Extent& operand) { return Overlap(written, operand); });
}

void Run(ffi::ThreadPool pool, const QuantizedMatmul& p, Buffers buffers) {
  static const CpuClone& clone = *RunnableCpuClones().front();
  const Extent out = OutExtent(p, buffers);
  std::vector<char> own(OverlapsOperands(p, buffers) ? out.bytes : 0);
  if (!own.empty()) buffers.out = own.data();
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
  if (!own.empty()) std::memcpy(const_cast<void*>(out.data), own.data(), own.size());
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
    if (p.batch > 0 && p.m > 0) Run(pool, p, operands.buffers);
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
