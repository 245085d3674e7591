// SPDX-License-Identifier: Apache-2.0
//
// The Python module: the handlers as capsules, and what was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "cuda/dispatch.h"
#include "xla_ffi/cpu/qmm_cpu.h"
#include "xla_ffi/handlers.h"

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
  for (auto [target, execute] :
       {std::pair{"jaxlowbit_quantized_matmul", JaxlowbitCudaExecute},
        std::pair{"jaxlowbit_quantized_matmul_fused", JaxlowbitCudaFusedExecute},
        std::pair{"jaxlowbit_quantized_matmuls", JaxlowbitCudaMatmulsExecute},
        std::pair{"jaxlowbit_quantized_mlp", JaxlowbitCudaMlpExecute}}) {
    nb::dict cuda;
    cuda["initialize"] = Encapsulate(JaxlowbitCudaInitialize);
    cuda["execute"] = Encapsulate(execute);
    targets["CUDA"][target] = cuda;
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
  info["cpu_isa"] = clones;  // that this machine can run; the first one is used
  return info;
}

// The choice that the CUDA handler would make, for a device that need not exist.
nb::dict SelectKernel(int64_t m, int64_t n, int64_t k, int bits, int64_t group_size, int64_t batch,
                      bool float32_scale, const std::string& zero, bool scale_sums, bool gated,
                      int compute_capability, int num_sms, int shared_bytes_per_sm,
                      int64_t workspace_bytes) {
  QuantizedMatmul problem;
  problem.epilogue.gated = gated;
  problem.batch = batch;
  problem.num_weights = batch * problem.weights_per_element();
  problem.m = m, problem.n = n, problem.k = k;
  problem.bits = bits;
  problem.group_size = group_size;
  if (float32_scale) problem.scale = ElementType::kF32;
  if (zero == "integer") problem.zero = ZeroKind::kInteger;
  if (zero == "float") problem.zero = ZeroKind::kFloat;
  problem.scale_sums = scale_sums;
  Device device{compute_capability, num_sms, shared_bytes_per_sm};
  AssumeClusters(device);
  nb::dict chosen;
  chosen["unsupported"] = Unsupported(problem, device);
  if (Unsupported(problem, device).empty()) {
    const Choice choice = Select(problem, device, workspace_bytes);
    chosen["kernel"] = choice.kernel == Kernel::kQmmSm80   ? "qmm_sm80"
                       : choice.kernel == Kernel::kQmmSm90 ? "qmm_sm90"
                                                           : "qmm_sm90_stream";
    chosen["block_m"] = choice.block_m;
    chosen["split_k"] = choice.split_k;
  }
  return chosen;
}

}  // namespace
}  // namespace jaxlowbit

NB_MODULE(JAXLOWBIT_MODULE_NAME, module) {
  module.def("targets", &jaxlowbit::Targets);
  module.def("build_info", &jaxlowbit::BuildInfo);
  module.def("select", &jaxlowbit::SelectKernel, nb::kw_only(), nb::arg("m"), nb::arg("n"),
             nb::arg("k"), nb::arg("bits") = 4, nb::arg("group_size") = 128, nb::arg("batch") = 1,
             nb::arg("float32_scale") = false, nb::arg("zero") = "none",
             nb::arg("scale_sums") = false, nb::arg("gated") = false,
             nb::arg("compute_capability") = 90, nb::arg("num_sms") = 132,
             nb::arg("shared_bytes_per_sm") = 228 * 1024,
             nb::arg("workspace_bytes") = jaxlowbit::kMaxWorkspaceBytes);
  module.attr("MAX_SPLIT_K") = jaxlowbit::kMaxSplitK;
  module.attr("MAX_WORKSPACE_BYTES") = jaxlowbit::kMaxWorkspaceBytes;
#if defined(JAXLOWBIT_WITH_CUDA) && defined(JAXLOWBIT_COUNT_EXECUTES)
  module.def("execute_count", &jaxlowbit::CudaExecuteCount);
#endif
}
