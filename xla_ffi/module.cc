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

// The property of a product that requires compilation at first use, such as "codebooks"; "" if every GPU has a
// prebuilt kernel.
std::string CompiledFor(const std::vector<int64_t>& product) {
  const QuantizedMatmul problem = ProductOf(product);
  if (Is8Bit(problem.lhs)) return "8-bit activations";
  if (problem.is_ragged()) return "rows in groups";
  if (problem.codebook != Codebook::kNone) return "codebooks";
  if (Is8Bit(problem.scale)) return "8-bit scales";
  if (!IsPrebuiltFormat(Family::kSm80, problem)) return std::to_string(problem.bits) + " bits";
  if (problem.scale_accumulators) return "float32 lhs";
  return problem.transposed ? "transposed products" : "";
}

// Maximum bytes of the partial sums of a product; any size that is not known is -1.
int64_t PartialSumsBytes(const std::vector<int64_t>& product) {
  const QuantizedMatmul p = ProductOf(product);
  if (p.batch < 0 || p.m < 0) return kMaxWorkspaceBytes;
  return MaxPartialSumsBytes(p.batch * p.weights_per_element() * p.m, p.out_columns());
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

using ChoiceFields = std::tuple<std::string, int, int, int, int, int>;
using EntryFields = std::tuple<std::vector<int64_t>, ChoiceFields, int64_t>;  // TunedEntry

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
      const QuantizedMatmul problem = ProductOf(fields);
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

// Defines a Python function of a SelectionQuery: a product (record.h) and keyword arguments. `early_start`:
// QuantizedMatmul::pdl (the name in saved measurements); `aligned`: weights_aligned.
template <typename Function>
void Define(nb::module_& module, const char* name, Function function) {
  module.def(
      name,
      [function](const std::vector<int64_t>& product, bool early_start, bool aligned,
                 int compute_capability, int num_sms, int shared_bytes_per_sm, int clock_mhz,
                 int memory_gb_per_s, const std::vector<std::vector<int>>& clusters, bool compiles,
                 const std::string& device_name, int64_t workspace_bytes) {
        QuantizedMatmul problem = ProductOf(product);
        if (!problem.is_ragged()) {
          problem.num_weights = problem.batch * problem.weights_per_element();
        }
        problem.pdl = early_start;
        problem.weights_aligned = aligned;
        Device device = DeviceOf(compute_capability, num_sms, shared_bytes_per_sm);
        device.clock_mhz = clock_mhz;
        device.memory_gb_per_s = memory_gb_per_s;
        if (!compiles) device.compiles = [] { return false; };
        SetClusters(clusters, &device);
        return function(SelectionQuery{problem, device, device_name, workspace_bytes});
      },
      nb::arg("product"), nb::kw_only(), nb::arg("early_start") = false, nb::arg("aligned") = true,
      nb::arg("compute_capability") = 90, nb::arg("num_sms") = 132,
      nb::arg("shared_bytes_per_sm") = kSm90SharedBytesPerSm, nb::arg("clock_mhz") = 0,
      nb::arg("memory_gb_per_s") = 0, nb::arg("clusters") = std::vector<std::vector<int>>(),
      nb::arg("compiles") = true, nb::arg("device_name") = "",
      nb::arg("workspace_bytes") = kMaxWorkspaceBytes);
}

void BindLimits(nb::module_& module) {
  nb::list kernels;
  for (const char* name : kKernelNames) kernels.append(name);
  module.attr("KERNELS") = kernels;
  nb::list kernel_bits, compiled_bits;
  for (int bits : kKernelBits) kernel_bits.append(bits);
  for (int bits : kCompiledBits) compiled_bits.append(bits);
  module.attr("KERNEL_BITS") = nb::tuple(kernel_bits);
  module.attr("COMPILED_BITS") = nb::tuple(compiled_bits);
  module.attr("MAX_TABLE_BITS") = kMaxTableBits;
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("MAX_SPLIT_K") = kMaxSplitK;
  module.attr("MAX_K_OF_8_BITS") = kMaxKOf8Bits;
  module.attr("MAX_RMS_NORM_COLUMNS") = kMaxRmsNormColumns;
  module.attr("MAX_ATTEND_HEAD_SIZE") = kMaxAttendHeadSize;
  module.attr("MAX_ATTEND_SHARED") = kMaxAttendShared;
  module.attr("BYTE_CACHE_CAPABILITY") = kByteCacheCapability;
  module.attr("MAX_CPU_ATTEND_HEAD_SIZE") = CpuAttend::kMaxHeadSize;
  module.attr("MAX_EXCHANGE_ROWS") = kMaxExchangeRows;
  module.attr("PLACE_ALIGNMENT") = kPlaceAlignment;
  module.attr("MAX_WORKSPACE_BYTES") = kMaxWorkspaceBytes;
}

}  // namespace
}  // namespace jaxlowbit

NB_MODULE(_ffi, module) {
#if defined(JAXLOWBIT_WITH_CUDA)
  jaxlowbit::BindJit(module);
  module.def("can_exchange", &jaxlowbit::CanExchange, nb::arg("devices"));
  module.def("take_exchange_failure", &jaxlowbit::TakeExchangeFailure,
             nb::call_guard<nb::gil_scoped_release>());
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
  jaxlowbit::BindLimits(module);
  module.def("unsupported", &jaxlowbit::Unsupported, nb::arg("product"),
             nb::arg("compute_capability"), nb::arg("kernel") = "");
  module.def(
      "min_rows_for_8bit",
      [](const std::vector<int64_t>& product) {
        return jaxlowbit::MinRowsFor8Bit(jaxlowbit::ProductOf(product));
      },
      nb::arg("product"));
  module.def("compiled_for", &jaxlowbit::CompiledFor, nb::arg("product"));
  module.def(
      "unsupported_int8_on_cpu",
      [](const std::vector<int64_t>& product, const std::string& isa) {
        return jaxlowbit::UnsupportedInt8(jaxlowbit::ProductOf(product), isa);
      },
      nb::arg("product"), nb::arg("isa"));
  module.def("codebook", &jaxlowbit::NameCodebook, nb::arg("numbers"));
  module.def("partial_sums_bytes", &jaxlowbit::PartialSumsBytes, nb::arg("product"));
  module.def("unsupported_route", &jaxlowbit::UnsupportedRoute, nb::kw_only(), nb::arg("columns"),
             nb::arg("experts"), nb::arg("top"), nb::arg("compute_capability"));
  module.def("attend_bytes", &jaxlowbit::MaxAttendBytes, nb::kw_only(), nb::arg("batch"),
             nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("reach"));
}
