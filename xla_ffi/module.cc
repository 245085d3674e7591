// SPDX-License-Identifier: Apache-2.0
//
// The Python module: handlers as capsules, the selection, and what was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/extents.h"
#include "cuda/gpu.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/limits.h"
#include "cuda/select/select.h"
#include "cuda/select/tuned.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/cpu/qmm_cpu.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/jit.h"

#if !defined(JAXLOWBIT_MODULE_NAME)
#define JAXLOWBIT_MODULE_NAME _ffi
#endif
#if !defined(JAXLOWBIT_CUDA_COMPILER)
#define JAXLOWBIT_CUDA_COMPILER ""
#endif
#if !defined(JAXLOWBIT_CUDA_ARCHITECTURES)
#define JAXLOWBIT_CUDA_ARCHITECTURES ""
#endif

namespace nb = nanobind;

namespace jaxlowbit {
namespace {

nb::capsule Encapsulate(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Platform to target to stage to handler.
nb::dict Targets() {
  nb::dict cpu;
  cpu["execute"] = Encapsulate(JaxlowbitCpuExecute);
  nb::dict targets;
  targets["cpu"] = nb::dict();
  targets["cpu"]["jaxlowbit_quantized_matmul"] = cpu;
#if defined(JAXLOWBIT_WITH_CUDA)
  targets["CUDA"] = nb::dict();
  const struct {
    const char* name;
    XLA_FFI_Handler *initialize, *execute;
  } calls[] = {
      {"jaxlowbit_quantized_matmul", JaxlowbitCudaInitialize, JaxlowbitCudaExecute},
      {"jaxlowbit_quantized_matmul_fused", JaxlowbitCudaFusedInitialize, JaxlowbitCudaFusedExecute},
      {"jaxlowbit_quantized_matmuls", JaxlowbitCudaMatmulsInitialize, JaxlowbitCudaMatmulsExecute},
      {"jaxlowbit_quantized_mlp", JaxlowbitCudaMlpInitialize, JaxlowbitCudaMlpExecute},
      {"jaxlowbit_quantized_block", JaxlowbitCudaBlockInitialize, JaxlowbitCudaBlockExecute},
      {"jaxlowbit_times", JaxlowbitCudaTimesInitialize, JaxlowbitCudaTimesExecute}};
  for (const auto& call : calls) {
    nb::dict cuda;
    cuda["instantiate"] = Encapsulate(JaxlowbitCudaInstantiate);
    cuda["initialize"] = Encapsulate(call.initialize);
    cuda["execute"] = Encapsulate(call.execute);
    targets["CUDA"][call.name] = cuda;
  }
#endif
  return targets;
}

nb::dict BuildInfo() {
#if defined(JAXLOWBIT_WITH_CUDA)
  constexpr bool kCuda = true;
#else
  constexpr bool kCuda = false;
#endif
  nb::list clones;
  for (const CpuClone* clone : RunnableCpuClones()) clones.append(clone->isa);
  nb::dict info;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["cuda"] = kCuda;
  info["cuda_compiler"] = JAXLOWBIT_CUDA_COMPILER;
  info["cuda_architectures"] = JAXLOWBIT_CUDA_ARCHITECTURES;
  info["cpu_isa"] = clones;  // those that this machine can run; the first one is used
  return info;
}

// A product on a device that need not exist, as Python describes it.
struct Question {
  QuantizedMatmul problem;
  Device device;
  std::string device_name;
  int64_t workspace_bytes;
};

// A choice as Python names its fields: kernel, block_m, split_k, slices, tile, mates (peers here).
nb::tuple Fields(const Choice& choice) {
  return nb::make_tuple(NameOf(choice.kernel), choice.block_m, choice.split_k, choice.slices,
                        choice.tile, choice.peers);
}

// The choice that the CUDA handler would make.
nb::dict SelectKernel(const Question& question) {
  const auto& [problem, device, device_name, workspace_bytes] = question;
  nb::dict chosen;
  const Support support = Supports(problem, device);
  chosen["unsupported"] = support.reason;
  if (support) {
    const Choice choice = Select(problem, device, workspace_bytes, TunedFor(device_name).get());
    chosen["kernel"] = NameOf(choice.kernel);
    chosen["block_m"] = choice.block_m;
    chosen["split_k"] = choice.split_k;
    chosen["tuned"] = choice.tuned;
    const InstanceKey key = KeyOf(problem, choice, device);
    chosen["instance"] = nb::make_tuple(NameOf(key.family), NameOf(key));
  }
  return chosen;
}

// The choices worth measuring, that of the cost model first; none if no kernel supports the problem.
nb::list ListCandidates(const Question& question) {
  const auto& [problem, device, device_name, workspace_bytes] = question;
  nb::list candidates;
  if (Supports(problem, device)) {
    for (const Choice& choice : Candidates(problem, device, workspace_bytes)) {
      candidates.append(Fields(choice));
    }
  }
  return candidates;
}

using ProblemFields =  // m, n, k, bits, group_size, type of lhs, whether scales are float32, zero
    std::tuple<int64_t, int64_t, int64_t, int, int64_t, std::string, bool, std::string>;
using ChoiceFields = std::tuple<std::string, int, int, int, int, int>;

QuantizedMatmul ProblemOf(const ProblemFields& fields) {
  const auto& [m, n, k, bits, group_size, lhs, float32_scale, zero] = fields;
  QuantizedMatmul problem;
  problem.m = m, problem.n = n, problem.k = k;
  problem.bits = bits;
  problem.group_size = GroupSize(group_size, k);
  problem.lhs = problem.out = lhs == "float16" ? ElementType::kF16 : ElementType::kBf16;
  problem.scale = float32_scale ? ElementType::kF32 : problem.lhs;
  if (zero == "integer") problem.zero = ZeroKind::kInteger;
  if (zero == "float") problem.zero = ZeroKind::kFloat;
  return problem;
}

Device DeviceOf(int compute_capability, int num_sms, int shared_bytes_per_sm) {
  Device device{compute_capability, num_sms, shared_bytes_per_sm};
  AssumeClusters(device);
  return device;
}

// Sets the table of a device from the entries that it can run. Returns for each entry why it cannot run, or "".
nb::list SetTunedEntries(const std::string& device_name,
                         const std::vector<std::pair<ProblemFields, ChoiceFields>>& entries,
                         int compute_capability, int num_sms, int shared_bytes_per_sm) {
  const Device device = DeviceOf(compute_capability, num_sms, shared_bytes_per_sm);
  std::vector<TunedEntry> accepted;
  nb::list reasons;
  for (const auto& [fields, numbers] : entries) {
    const auto& [kernel, block_m, split_k, slices, tile, mates] = numbers;
    const auto named = std::find(std::begin(kKernelNames), std::end(kKernelNames), kernel);
    std::string reason = "there is no kernel " + kernel;
    if (named != std::end(kKernelNames)) {
      const QuantizedMatmul problem = ProblemOf(fields);
      const Choice choice =
          ChoiceOf({named - std::begin(kKernelNames), block_m, split_k, slices, tile, mates});
      reason = Supports(choice, problem, device, kMaxWorkspaceBytes).reason;
      if (reason.empty()) accepted.push_back({problem, choice});
    }
    reasons.append(reason);
  }
  SetTuned(device_name, std::move(accepted));
  return reasons;
}

// Defines a function of a question, whose arguments are named. `early_start` is the problem's `pdl`, `aligned` its
// `weights_aligned`.
template <typename Function>
void Define(nb::module_& module, const char* name, Function function) {
  module.def(
      name,
      [function](int64_t m, int64_t n, int64_t k, int bits, int64_t group_size, int64_t batch,
                 const std::string& lhs, bool float32_scale, const std::string& zero,
                 bool scale_sums, bool half_sums, bool transposed, bool gated, bool early_start,
                 bool aligned, int compute_capability, int num_sms, int shared_bytes_per_sm,
                 const std::string& device_name, int64_t workspace_bytes) {
        QuantizedMatmul problem = ProblemOf({m, n, k, bits, group_size, lhs, float32_scale, zero});
        problem.epilogue.gated = gated;
        problem.batch = batch;
        problem.num_weights = batch * problem.weights_per_element();
        problem.scale_sums = scale_sums;
        problem.half_sums = half_sums;
        problem.transposed = transposed;
        problem.pdl = early_start;
        problem.weights_aligned = aligned;
        return function(Question{problem,
                                 DeviceOf(compute_capability, num_sms, shared_bytes_per_sm),
                                 device_name, workspace_bytes});
      },
      nb::kw_only(), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("bits") = 4,
      nb::arg("group_size") = 128, nb::arg("batch") = 1, nb::arg("lhs") = "bfloat16",
      nb::arg("float32_scale") = false, nb::arg("zero") = "none", nb::arg("scale_sums") = false,
      nb::arg("half_sums") = false, nb::arg("transposed") = false, nb::arg("gated") = false,
      nb::arg("early_start") = false, nb::arg("aligned") = true, nb::arg("compute_capability") = 90,
      nb::arg("num_sms") = 132, nb::arg("shared_bytes_per_sm") = kSm90SharedBytesPerSm,
      nb::arg("device_name") = "", nb::arg("workspace_bytes") = kMaxWorkspaceBytes);
}

}  // namespace
}  // namespace jaxlowbit

NB_MODULE(JAXLOWBIT_MODULE_NAME, module) {
#if defined(JAXLOWBIT_WITH_CUDA)
  jaxlowbit::BindJit(module);
#endif
  module.def("targets", &jaxlowbit::Targets);
  module.def("build_info", &jaxlowbit::BuildInfo);
  jaxlowbit::Define(module, "select", jaxlowbit::SelectKernel);
  jaxlowbit::Define(module, "candidates", jaxlowbit::ListCandidates);
  module.def("set_tuned", &jaxlowbit::SetTunedEntries, nb::arg("device_name"), nb::arg("entries"),
             nb::kw_only(), nb::arg("compute_capability"), nb::arg("num_sms"),
             nb::arg("shared_bytes_per_sm"));
  nb::list kernels;
  for (const char* name : jaxlowbit::kKernelNames) kernels.append(name);
  module.attr("KERNELS") = kernels;
  module.attr("PRODUCT_NUMBERS") = jaxlowbit::kProductNumbers;
  nb::list kernel_bits, compiled_bits;
  for (int bits : jaxlowbit::kKernelBits) kernel_bits.append(bits);
  for (int bits : jaxlowbit::kCompiledBits) compiled_bits.append(bits);
  module.attr("KERNEL_BITS") = nb::tuple(kernel_bits);
  module.attr("COMPILED_BITS") = nb::tuple(compiled_bits);
  module.attr("CALL_VERSION") = jaxlowbit::kCallVersion;
  module.attr("LAYOUT_VERSION") = jaxlowbit::kLayoutVersion;
  module.attr("MAX_SPLIT_K") = jaxlowbit::kMaxSplitK;
  module.def("most_sums_bytes", &jaxlowbit::MostSumsBytes, nb::arg("rows"), nb::arg("columns"));
  module.attr("MAX_RMS_NORM_COLUMNS") = jaxlowbit::kMaxRmsNormColumns;
  module.attr("PLACE_ALIGNMENT") = jaxlowbit::kPlaceAlignment;
  module.attr("MAX_WORKSPACE_BYTES") = jaxlowbit::kMaxWorkspaceBytes;
#if defined(JAXLOWBIT_WITH_CUDA) && defined(JAXLOWBIT_COUNT_EXECUTES)
  module.def("execute_count", &jaxlowbit::CudaExecuteCount);
#endif
}
