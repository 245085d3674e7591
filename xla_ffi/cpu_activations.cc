// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler of a product of quantized activations. Its operands are those of operands.h, but for
//
//   0 lhs        s8[b, m, k]
//   1 lhs_scale  f32[b, m]: those of the rows of lhs
//
// which the others follow, and results are of bf16 or f32.
#include <algorithm>
#include <memory>

#include "cpu/qmm_cpu.h"
#include "cpu/tuning.h"
#include "xla_ffi/cpu_overlap.h"
#include "xla_ffi/cpu_team.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {
namespace {

void Run(ffi::ThreadPool pool, const CpuClone& clone, const QuantizedMatmul& p,
         const Buffers& buffers) {
  const CpuCall call{p, buffers};
  // Not initialized.
  const std::unique_ptr<uint32_t[]> permuted(
      new uint32_t[p.batch * p.k_blocks() * p.m * kInt8Words]);
  // Blocks of equal size, up to one row.
  const int64_t m_blocks = CeilDiv(p.m, kInt8Tokens);
  Team team;
  team.AddPhase(CeilDiv(p.m, kPermutedRows), [&](int64_t task, int64_t) {
    const int64_t begin = task * kPermutedRows;
    clone.permute_int8(call, begin, std::min(p.m, begin + kPermutedRows), permuted.get());
  });
  team.AddPhase(p.batch * p.n_blocks() * m_blocks, [&](int64_t task, int64_t) {
    const int64_t m_block = task % m_blocks, strip = task / m_blocks;
    clone.int8(call, strip / p.n_blocks(), strip % p.n_blocks(), p.m * m_block / m_blocks,
               p.m * (m_block + 1) / m_blocks, permuted.get());
  });
  team.Run(pool, UsefulThreads(pool, p.batch * p.m * p.n * p.k));
}

ffi::Error CheckIntegers(const QuantizedMatmul& p) {
  if (p.lhs != ElementType::kInt8) {
    return Refuse("lhs is f8e4m3fn but the CPU multiplies s8; use float activations.");
  }
  if (p.codebook != Codebook::kNone || Is8Bit(p.scale)) {
    return Refuse(
        "weights have a codebook or 8-bit scales but int8 activations on the CPU are multiplied by "
        "integers with scales of 16 or 32 bits; use float activations.");
  }
  return ffi::Error::Success();
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                   ffi::AnyBuffer index, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Dictionary dictionary) {
  return Guard("quantized_matmul", [&] {
    static const CpuClone& clone = *RunnableCpuClones().front();
    Attributes attributes(dictionary);
    auto product = ProductAttributes::OfFormat(&attributes);
    product.quantized_lhs = true;
    Operands operands;
    const QuantizedMatmul& p = operands.problem;
    ffi::Error error = attributes.Check();
    if (error.success()) {
      error = DecodeOperands(lhs, {packed, scale, zero, index}, *out, product, &operands);
    }
    if (error.success()) error = CheckIntegers(p);
    if (error.success()) {
      error =
          CheckType("lhs_scale", lhs_scale, lhs_scale.element_type() == ffi::DataType::F32, "f32");
    }
    if (error.success()) {
      error = CheckShape("lhs_scale", lhs_scale, {p.batch, p.m}, "[batch, m]");
    }
    if (error.failure()) return error;
    if (clone.int8 == nullptr) {
      return Refuse(
          "this CPU has no AVX-512 VNNI, by which the program multiplies int8; compile "
          "it on this machine.");
    }
    operands.buffers.lhs_scale = static_cast<const float*>(lhs_scale.untyped_data());
    if (p.batch > 0 && p.m > 0) {
      RunApart(p, operands.buffers, [&](const Buffers& buffers) { Run(pool, clone, p, buffers); });
    }
    return error;
  });
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCpuActivationsExecute, jaxlowbit::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // packed
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // zero
                                  .Arg<xla::ffi::AnyBuffer>()  // index
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Attrs());
