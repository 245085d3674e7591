// SPDX-License-Identifier: Apache-2.0
//
// gate: hidden[i] = activation(products[i]) * products[size + i], in float32, between the products of
// a gated MLP.
//
// Bound. 6 bytes per element of bf16 or f16, which the kernel before left in L2: for few tokens what
// counts is that the next product does not wait for a launch.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/dependency.cuh"
#include "cuda/early_start.h"
#include "cuda/kernels.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements of the widest load

// As jax.nn has them, NaN for NaN.
__device__ float Activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1.0f + expf(-x));
    case Activation::kGelu:
      return 0.5f * x * erfcf(-0.70710678f * x);
    case Activation::kGeluTanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
  }
  return x;
}

template <typename T, int kElements>
struct alignas(kElements * sizeof(T)) Vector {
  T at[kElements];
};

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads)
    GateKernel(Activation activation, const T* products, T* hidden, int64_t size) {
  using V = Vector<T, kElements>;
  LaunchDependents();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements;
  if (i >= size) return;
  WaitForPreviousKernels();
  const V gate = *reinterpret_cast<const V*>(products + i);
  const V up = *reinterpret_cast<const V*>(products + size + i);
  V out;
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    out.at[j] =
        T(Activate(activation, static_cast<float>(gate.at[j])) * static_cast<float>(up.at[j]));
  }
  *reinterpret_cast<V*>(hidden + i) = out;
}

template <typename T>
cudaError_t Launch(Activation activation, const void* products, void* hidden, int64_t size,
                   const cudaLaunchAttribute* early_start, cudaStream_t stream) {
  // The second half of the products begins at a multiple of a vector, too.
  const int elements = size % kVector == 0 ? kVector : 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(CeilDiv(size, int64_t{kThreads} * elements));
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = const_cast<cudaLaunchAttribute*>(early_start);
  config.numAttrs = early_start == nullptr ? 0 : 1;
  return cudaLaunchKernelEx(&config, elements == 1 ? GateKernel<T, 1> : GateKernel<T, kVector>,
                            activation, static_cast<const T*>(products), static_cast<T*>(hidden),
                            size);
}

}  // namespace

cudaError_t InitializeGate() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const void* kernel : {reinterpret_cast<const void*>(GateKernel<__nv_bfloat16, 1>),
                             reinterpret_cast<const void*>(GateKernel<__nv_bfloat16, kVector>),
                             reinterpret_cast<const void*>(GateKernel<__half, 1>),
                             reinterpret_cast<const void*>(GateKernel<__half, kVector>)}) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchGate(Activation activation, ElementType type, const void* products, void* hidden,
                       int64_t size, int device, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  const cudaLaunchAttribute attribute = EarlyStart();
  const bool early = DeviceInfo(device).compute_capability >= 90;
  const auto launch = type == ElementType::kBf16 ? Launch<__nv_bfloat16> : Launch<__half>;
  return launch(activation, products, hidden, size, early ? &attribute : nullptr, stream);
}

}  // namespace jaxlowbit
