// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler of a call (call.h): one product with float or quantized activations, or a block (cpu_block.h), or
// several of these (layers.h).
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/qmm_cpu.h"
#include "cpu/tuning.h"
#include "xla_ffi/call.h"
#include "xla_ffi/cpu_block.h"
#include "xla_ffi/cpu_team.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/layers.h"
#include "xla_ffi/plan_cache.h"

namespace jaxlowbit {
namespace {

void RunFloats(ffi::ThreadPool pool, const CpuClone& clone, const QuantizedMatmul& p,
               const Buffers& buffers) {
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

void RunIntegers(ffi::ThreadPool pool, const CpuClone& clone, const QuantizedMatmul& p,
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
    return InvalidArgument("lhs is f8e4m3fn but the CPU multiplies s8; use float activations.");
  }
  if (p.codebook != Codebook::kNone || Is8Bit(p.scale)) {
    return InvalidArgument(
        "weights have a codebook or 8-bit scales but int8 activations on the CPU are multiplied by "
        "integers with scales of 16 or 32 bits; use float activations.");
  }
  return ffi::Error::Success();
}

ffi::Error CheckProduct(const QuantizedMatmul& p, const CpuClone& clone) {
  if (p.transposed) {
    return InvalidArgument("the CPU kernel has no transposed product; it runs as plain XLA.");
  }
  if (HasTwoLevels(p.scale)) {
    return InvalidArgument(
        "scale is u8 but the CPU kernels read no scales of two levels; expand them to f32.");
  }
  if (p.permuted_parts > 0 || p.apply_lhs_scale || p.is_integer_matmul()) {
    return InvalidArgument("the CPU kernels have no permutation, and results of floats only.");
  }
  if (!Is8Bit(p.lhs)) return ffi::Error::Success();
  const ffi::Error error = CheckIntegers(p);
  if (error.failure() || clone.int8 != nullptr) return error;
  return InvalidArgument(
      "this CPU has no AVX-512 VNNI, by which the program multiplies int8; compile it on this "
      "machine.");
}

// A call of one product, all but its pointers.
struct CpuPlan {
  QuantizedMatmul problem;
  Addresses buffers;
  std::vector<float> codebook;
  bool redirected = false;  // the result overlaps an operand
  int64_t out_bytes = 0;
};

PlanCache<CpuPlan>& plans = *new PlanCache<CpuPlan>(4096);

// Checks a call of one product and plans it.
ffi::Error Plan(const Call& call, Ways* ways, CpuPlan* plan) {
  if (call.operands.size() != 1) {
    return InvalidArgument("a call of the CPU has one product, or a block.");
  }
  const auto& [p, buffers] = call.operands[0];
  const Epilogue& e = p.epilogue;
  if (buffers.bias != nullptr || buffers.residual != nullptr || e.gated ||
      e.activation != Activation::kNone) {
    return InvalidArgument("the CPU kernels have no epilogue; it runs as plain XLA.");
  }
  plan->problem = p;
#define JAXLOWBIT_PLACE(name) plan->buffers.name = call.AddressAt(call.products[0].places.name);
#include "xla_ffi/call.def"
  if (p.codebook != Codebook::kNone) {
    plan->codebook.assign(buffers.codebook, buffers.codebook + (size_t{1} << p.bits));
    plan->buffers.codebook = plan->codebook.data();
  }
  const AddressExtent out = OutExtent(p, plan->buffers);
  plan->out_bytes = out.bytes;
  // XLA may let the result overlap operands, but tasks read operands until the last task ends.
  for (const AddressExtent& operand : OperandExtents(p, plan->buffers, false)) {
    plan->redirected |= ways->Overlap(out, operand);
  }
  return ffi::Error::Success();
}

void Run(ffi::ThreadPool pool, const CpuPlan& plan, void* const* pointers) {
  static const CpuClone& clone = *RunnableCpuClones().front();
  const QuantizedMatmul& p = plan.problem;
  if (p.batch == 0 || p.m == 0) return;
  Buffers buffers = BuffersAt(plan.buffers, pointers);
  void* const out = buffers.out;
  std::vector<char> own(plan.redirected ? plan.out_bytes : 0);
  if (plan.redirected) buffers.out = own.data();
  if (Is8Bit(p.lhs)) {
    RunIntegers(pool, clone, p, buffers);
  } else {
    RunFloats(pool, clone, p, buffers);
  }
  if (plan.redirected) std::memcpy(out, own.data(), own.size());
}

// Runs a call without a plan, which is kept if the call has one product.
ffi::Error RunUnplanned(ffi::ThreadPool pool, const CallKey& key, Call call) {
  static const CpuClone& clone = *RunnableCpuClones().front();
  ffi::Error error = call.Decode();
  for (const Operands& product : call.operands) {
    if (error.success()) error = CheckProduct(product.problem, clone);
  }
  if (error.failure()) return error;
  if (call.steps.size() > 1) return RunCpuBlock(pool, call);
  const auto plan = std::make_shared<CpuPlan>();
  Ways ways(key.pointers.data());
  error = Plan(call, &ways, plan.get());
  if (error.failure()) return error;
  plans.Keep(key, ways.questions(), false, plan);
  Run(pool, *plan, key.pointers.data());
  return error;
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   RawAttributes attributes) {
  thread_local CallKey key;
  try {
    key.Read(args, rets, attributes);
    if (const CpuPlan* plan = plans.Find(key); plan != nullptr) {
      Run(pool, *plan, key.pointers.data());
      return ffi::Error::Success();
    }
    if (const auto layers = FindLayers(attributes)) {
      return ForEachLayer(*layers, args, rets, attributes,
                          [pool](const auto&... call) { return Execute(pool, call...); });
    }
    const Call call(args, rets, ffi::Dictionary(attributes.attrs));
    const ffi::Error error = RunUnplanned(pool, key, call);
    return error.success() ? error : Named(call.attributes.caller(), error);
  } catch (...) {
    return Thrown(Attributes(ffi::Dictionary(attributes.attrs)).caller());
  }
}

}  // namespace
}  // namespace jaxlowbit

// As XLA_FFI_DEFINE_HANDLER_SYMBOL defines it, but without its two functions around the handler.
extern "C" XLA_FFI_Error* JaxlowbitCpuExecute(XLA_FFI_CallFrame* frame) {
  using namespace xla::ffi;
  static auto* const handler = Ffi::Bind()
                                   .Ctx<ThreadPool>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs<jaxlowbit::RawAttributes>()
                                   .To(jaxlowbit::Execute)
                                   .release();
  return handler->Call(frame);
}
