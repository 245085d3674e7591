// SPDX-License-Identifier: Apache-2.0
//
// The Python module: handlers as capsules, kernel selection, and build information.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/attend_cpu.h"
#include "cpu/qmm_cpu.h"
#include "cuda/codebook.h"
#include "cuda/extents.h"
#include "cuda/gpu.h"
#include "cuda/kernels/instance_key.h"
#include "cuda/limits.h"
#include "cuda/select/cache.h"
#include "cuda/select/select.h"
#include "cuda/select/tuned.h"
#include "xla_ffi/bind.h"
#include "xla_ffi/call.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/record.h"
#if defined(JAXLOWBIT_WITH_CUDA)
#include "cuda/ops/exchange.h"
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

// Maps platform, target and stage to a handler.
nb::dict Targets() {
  nb::dict targets;
  targets["cpu"] = nb::dict();
  for (const auto& [name, execute] : {std::pair{"jaxlowbit_sequence", JaxlowbitCpuExecute},
                                      std::pair{"jaxlowbit_attend", JaxlowbitCpuAttendExecute}}) {
    nb::dict cpu;
    cpu["execute"] = Encapsulate(execute);
    targets["cpu"][name] = cpu;
  }
#if defined(JAXLOWBIT_WITH_CUDA)
  targets["CUDA"] = nb::dict();
  nb::dict sequence, times;
  sequence["instantiate"] = Encapsulate(JaxlowbitCudaInstantiate);
  sequence["initialize"] = Encapsulate(JaxlowbitCudaInitialize);
  sequence["execute"] = Encapsulate(JaxlowbitCudaExecute);
  times["initialize"] = Encapsulate(JaxlowbitCudaTimesInitialize);
  times["execute"] = Encapsulate(JaxlowbitCudaTimesExecute);
  targets["CUDA"]["jaxlowbit_sequence"] = sequence;
  targets["CUDA"]["jaxlowbit_times"] = times;
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
  info["cpu_isa"] = clones;  // runnable on this machine; the first one is used
  return info;
}

// A product on a device, which need not exist, as described by Python.
struct SelectionQuery {
  QuantizedMatmul problem;
  Device device;
  std::string device_name;
  int64_t workspace_bytes;
};

// A choice in the order of Python's fields: kernel, block_m, split_k, slices, tile, peers.
nb::tuple Fields(const Choice& choice) {
  return nb::make_tuple(NameOf(choice.kernel), choice.block_m, choice.split_k, choice.slices,
                        choice.tile, choice.peers);
}

// The kernels' name of a codebook's kind; "none" without numbers.
std::string NameCodebook(const std::vector<float>& numbers) {
  int bits = 0;
  while (size_t{1} << bits < numbers.size()) ++bits;
  return kCodebookNames[static_cast<int>(
      CodebookOf(numbers.empty() ? nullptr : numbers.data(), bits))];
}

// The choice of the CUDA handler.
nb::dict SelectKernel(const SelectionQuery& query) {
  const auto& [problem, device, device_name, workspace_bytes] = query;
  nb::dict chosen;
  const Support support = Supports(problem, device);
  chosen["unsupported"] = support.reason;
  if (support) {
    const Choice choice =
        SelectCached(problem, device, workspace_bytes, TunedFor(device_name).get());
    chosen["kernel"] = NameOf(choice.kernel);
    chosen["block_m"] = choice.block_m;
    chosen["split_k"] = choice.split_k;
    chosen["tuned"] = choice.tuned;
    const InstanceKey key = KeyOf(problem, choice, device);
    chosen["instance"] = nb::make_tuple(NameOf(key.family), NameOf(key));
  }
  return chosen;
}

Device DeviceOf(int compute_capability, int num_sms, int shared_bytes_per_sm) {
  Device device{compute_capability, num_sms, shared_bytes_per_sm};
  AssumeClusters(device);
  return device;
}

Kernel FindKernel(const std::string& name) {
  const auto found = std::find(std::begin(kKernelNames), std::end(kKernelNames), name);
  if (found == std::end(kKernelNames)) throw std::invalid_argument("no kernel " + name);
  return static_cast<Kernel>(found - std::begin(kKernelNames));
}

QuantizedMatmul ProductOf(const std::vector<int64_t>& numbers) {
  if (numbers.size() != kProductNumbers) throw std::invalid_argument("not a product");
  QuantizedMatmul problem;
  Places places;
  const std::string_view wrong = DecodeProduct(numbers.data(), &problem, &places);
  if (!wrong.empty()) throw std::invalid_argument(std::string(wrong) + " is none of its type");
  return problem;
}

// Returns "" if `kernel`, or any kernel, computes a product on GPUs of a compute capability, else the reason. Assumes
// that GPUs have a compiler.
std::string Unsupported(const std::vector<int64_t>& product, int compute_capability,
                        const std::string& kernel) {
  const QuantizedMatmul problem = ProductOf(product);
  const Device device = DeviceOf(compute_capability, 132, kSm90SharedBytesPerSm);
  if (kernel.empty()) return Supports(problem, device).reason;
  return Supports(FindKernel(kernel), problem, device).reason;
}

// The choices worth measuring, the cost model's first; empty if no kernel supports the problem.
nb::list ListCandidates(const SelectionQuery& query) {
  const auto& [problem, device, device_name, workspace_bytes] = query;
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
using EntryFields = std::tuple<ProblemFields, ChoiceFields, int64_t>;  // TunedEntry

QuantizedMatmul ProblemOf(const ProblemFields& fields) {
  const auto& [m, n, k, bits, group_size, lhs, float32_scale, zero] = fields;
  QuantizedMatmul problem;
  problem.m = m, problem.n = n, problem.k = k;
  problem.bits = bits;
  problem.lhs = lhs == "float16"         ? ElementType::kF16
                : lhs == "int8"          ? ElementType::kInt8
                : lhs == "float8_e4m3fn" ? ElementType::kE4m3
                                         : ElementType::kBf16;
  problem.out = problem.floats();
  problem.scale = float32_scale ? ElementType::kF32 : problem.floats();
  problem.group_size = GroupSize(group_size, k, problem.scale);
  if (zero == "integer") problem.zero = ZeroKind::kInteger;
  if (zero == "float") problem.zero = ZeroKind::kFloat;
  return problem;
}

// Evaluates the cost model of a kernel for many choices, to fit its constants (tools/fit_costs.py).
class CostModel {
 public:
  CostModel(const std::string& kernel,
            const std::vector<std::pair<SelectionQuery, ChoiceNumbers>>& choices) {
    const Kernel named = FindKernel(kernel);
    constants_ = CostConstants(named);
    for (const auto& [query, numbers] : choices) {
      if (numbers[0] != static_cast<int>(named))
        throw std::invalid_argument("a choice of another kernel");
      if (const Support support =
              Supports(ChoiceOf(numbers), query.problem, query.device, query.workspace_bytes);
          !support) {
        throw std::invalid_argument("a choice that cannot run: " + support.reason);
      }
      choices_.push_back({query, ChoiceOf(numbers)});
    }
  }

  // The fitted constants, in the order of the kernel's costs.inc.
  const std::vector<double>& constants() const { return constants_; }

  // Microseconds of each choice with the given constants.
  std::vector<double> Microseconds(const std::vector<double>& constants) const {
    if (constants.size() != constants_.size()) {
      throw std::invalid_argument("the kernel has " + std::to_string(constants_.size()) +
                                  " constants");
    }
    std::vector<double> costs;
    for (const auto& [query, choice] : choices_) {
      costs.push_back(Cost(query.problem, query.device, choice, constants.data()));
    }
    return costs;
  }

 private:
  std::vector<double> constants_;
  std::vector<std::pair<SelectionQuery, Choice>> choices_;
};

// Sets a device's table to the entries that it can run. Returns for each entry "" or the reason why it cannot run.
nb::list SetTunedEntries(const std::string& device_name, const std::vector<EntryFields>& entries,
                         int compute_capability, int num_sms, int shared_bytes_per_sm) {
  const Device device = DeviceOf(compute_capability, num_sms, shared_bytes_per_sm);
  std::vector<TunedEntry> accepted;
  nb::list reasons;
  for (const auto& [fields, numbers, min_m] : entries) {
    const auto& [kernel, block_m, split_k, slices, tile, peers] = numbers;
    const auto named = std::find(std::begin(kKernelNames), std::end(kKernelNames), kernel);
    std::string reason = "there is no kernel " + kernel;
    if (named != std::end(kKernelNames)) {
      const QuantizedMatmul problem = ProblemOf(fields);
      const Choice choice =
          ChoiceOf({named - std::begin(kKernelNames), block_m, split_k, slices, tile, peers});
      reason = Supports(choice, problem, device, kMaxWorkspaceBytes).reason;
      if (reason.empty()) accepted.push_back({problem, choice, min_m});
    }
    reasons.append(reason);
  }
  SetTuned(device_name, std::move(accepted));
  return reasons;
}

Codebook FindCodebook(const std::string& name) {
  const auto found = std::find(std::begin(kCodebookNames), std::end(kCodebookNames), name);
  if (found == std::end(kCodebookNames)) throw std::invalid_argument("no codebook " + name);
  return static_cast<Codebook>(found - std::begin(kCodebookNames));
}

// Sets queried cluster counts: a row each for 1 and 2 CTAs per multiprocessor, with clusters of 1, 2 and 4 CTAs.
// Without rows, keeps the counts of AssumeClusters.
void SetClusters(const std::vector<std::vector<int>>& clusters, Device* device) {
  if (clusters.empty()) return;
  for (int ctas_per_sm : {1, 2}) {
    for (int i = 0; i < 3; ++i) {
      device->clusters[ctas_per_sm][1 << i] = clusters.at(ctas_per_sm - 1).at(i);
    }
  }
}

// Defines a Python function of a SelectionQuery with keyword arguments. `early_start`: QuantizedMatmul::pdl (the name
// in saved measurements); `aligned`: weights_aligned.
template <typename Function>
void Define(nb::module_& module, const char* name, Function function) {
  module.def(
      name,
      [function](int64_t m, int64_t n, int64_t k, int bits, const std::string& codebook,
                 int64_t group_size, int64_t batch, const std::string& lhs, bool float32_scale,
                 const std::string& narrow_scale, const std::string& zero, bool scale_accumulators,
                 bool accumulate_float16, bool transposed, bool gated, bool early_start,
                 bool aligned, int compute_capability, int num_sms, int shared_bytes_per_sm,
                 int clock_mhz, int memory_gb_per_s, const std::vector<std::vector<int>>& clusters,
                 bool compiles, const std::string& device_name, int64_t workspace_bytes) {
        QuantizedMatmul problem = ProblemOf({m, n, k, bits, group_size, lhs, float32_scale, zero});
        problem.codebook = FindCodebook(codebook);
        if (narrow_scale == "e8m0") problem.scale = ElementType::kE8m0;
        if (narrow_scale == "e4m3") problem.scale = ElementType::kE4m3;
        if (narrow_scale == "int8") problem.scale = ElementType::kInt8;
        if (narrow_scale == "super") {
          problem.scale = ElementType::kSuper;
          problem.group_size = group_size;
        }
        problem.epilogue.gated = gated;
        problem.batch = batch;
        problem.num_weights = batch * problem.weights_per_element();
        problem.scale_accumulators = scale_accumulators;
        problem.accumulate_float16 = accumulate_float16;
        problem.transposed = transposed;
        problem.pdl = early_start;
        problem.weights_aligned = aligned;
        Device device = DeviceOf(compute_capability, num_sms, shared_bytes_per_sm);
        device.clock_mhz = clock_mhz;
        device.memory_gb_per_s = memory_gb_per_s;
        if (!compiles) device.compiles = [] { return false; };
        SetClusters(clusters, &device);
        return function(SelectionQuery{problem, device, device_name, workspace_bytes});
      },
      nb::kw_only(), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("bits") = 4,
      nb::arg("codebook") = "none", nb::arg("group_size") = 128, nb::arg("batch") = 1,
      nb::arg("lhs") = "bfloat16", nb::arg("float32_scale") = false, nb::arg("narrow_scale") = "",
      nb::arg("zero") = "none", nb::arg("scale_accumulators") = false,
      nb::arg("accumulate_float16") = false, nb::arg("transposed") = false,
      nb::arg("gated") = false, nb::arg("early_start") = false, nb::arg("aligned") = true,
      nb::arg("compute_capability") = 90, nb::arg("num_sms") = 132,
      nb::arg("shared_bytes_per_sm") = kSm90SharedBytesPerSm, nb::arg("clock_mhz") = 0,
      nb::arg("memory_gb_per_s") = 0, nb::arg("clusters") = std::vector<std::vector<int>>(),
      nb::arg("compiles") = true, nb::arg("device_name") = "",
      nb::arg("workspace_bytes") = kMaxWorkspaceBytes);
}

}  // namespace
}  // namespace jaxlowbit

NB_MODULE(_ffi, module) {
#if defined(JAXLOWBIT_WITH_CUDA)
  jaxlowbit::BindJit(module);
  module.def("can_exchange", &jaxlowbit::CanExchange, nb::arg("devices"));
  module.def("execute_count", &jaxlowbit::CudaExecuteCount);
#endif
  jaxlowbit::BindRecords(module);
  module.def("targets", &jaxlowbit::Targets);
  module.def("build_info", &jaxlowbit::BuildInfo);
  jaxlowbit::Define(module, "select", jaxlowbit::SelectKernel);
  jaxlowbit::Define(module, "candidates", jaxlowbit::ListCandidates);
  nb::class_<jaxlowbit::SelectionQuery>(module, "Question");
  jaxlowbit::Define(module, "question",
                    [](const jaxlowbit::SelectionQuery& query) { return query; });
  using jaxlowbit::CostModel;
  nb::class_<CostModel>(module, "CostModel")
      .def(
          nb::init<
              const std::string&,
              const std::vector<std::pair<jaxlowbit::SelectionQuery, jaxlowbit::ChoiceNumbers>>&>(),
          nb::arg("kernel"), nb::arg("choices"))
      .def_prop_ro("constants", &CostModel::constants)
      .def("microseconds", &CostModel::Microseconds, nb::arg("constants"));
  module.def("set_tuned", &jaxlowbit::SetTunedEntries, nb::arg("device_name"), nb::arg("entries"),
             nb::kw_only(), nb::arg("compute_capability"), nb::arg("num_sms"),
             nb::arg("shared_bytes_per_sm"));
  nb::list kernels;
  for (const char* name : jaxlowbit::kKernelNames) kernels.append(name);
  module.attr("KERNELS") = kernels;
  nb::list kernel_bits, compiled_bits;
  for (int bits : jaxlowbit::kKernelBits) kernel_bits.append(bits);
  for (int bits : jaxlowbit::kCompiledBits) compiled_bits.append(bits);
  module.attr("KERNEL_BITS") = nb::tuple(kernel_bits);
  module.attr("COMPILED_BITS") = nb::tuple(compiled_bits);
  module.attr("MAX_TABLE_BITS") = jaxlowbit::kMaxTableBits;
  module.def("unsupported", &jaxlowbit::Unsupported, nb::arg("product"),
             nb::arg("compute_capability"), nb::arg("kernel") = "");
  module.def(
      "min_rows_for_8bit",
      [](const std::vector<int64_t>& product) {
        return jaxlowbit::MinRowsFor8Bit(jaxlowbit::ProductOf(product));
      },
      nb::arg("product"));
  module.def("codebook", &jaxlowbit::NameCodebook, nb::arg("numbers"));
  module.attr("LAYOUT_VERSION") = jaxlowbit::kLayoutVersion;
  module.attr("MAX_SPLIT_K") = jaxlowbit::kMaxSplitK;
  module.def("max_partial_sums_bytes", &jaxlowbit::MaxPartialSumsBytes, nb::arg("rows"),
             nb::arg("columns"));
  module.attr("MAX_RMS_NORM_COLUMNS") = jaxlowbit::kMaxRmsNormColumns;
  module.attr("MAX_ATTEND_HEAD_SIZE") = jaxlowbit::kMaxAttendHeadSize;
  module.attr("MAX_ATTEND_SHARED") = jaxlowbit::kMaxAttendShared;
  module.attr("MAX_CPU_ATTEND_HEAD_SIZE") = jaxlowbit::CpuAttend::kMaxHeadSize;
  module.attr("MAX_EXCHANGE_ROWS") = jaxlowbit::kMaxExchangeRows;
  module.attr("PLACE_ALIGNMENT") = jaxlowbit::kPlaceAlignment;
  module.attr("MAX_WORKSPACE_BYTES") = jaxlowbit::kMaxWorkspaceBytes;
}
