// SPDX-License-Identifier: Apache-2.0
//
// quantize_rows: of each row, scale = max(largest magnitude / most, 2^-126) and values = round(x / scale), with most =
// 127 for int8 and 448 for e4m3, to the nearest, ties to even; x is floats, or floats / factor. A row of zeros has the
// scale 1, one with a NaN or an infinity the scale NaN and the values 0 (jaxlowbit/_core/activations.py).
//
// Bound. Memory; for few rows, latency: from the start of the kernel to that of the product, which is launched
// meanwhile. So a row is one CTA, and is kept in registers between its largest magnitude and its values. A thread has
// units: the 16 columns whose values it stores as 16 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <limits>

#include "cuda/device/pdl.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/quantize_rows.h"

namespace jaxlowbit {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kColumns = static_cast<int>(kInterleavedColumns);  // of a unit
constexpr int kMaxUnits = 2;                                     // of a thread, in registers
constexpr uint32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;    // bits of float32

template <typename T>
struct alignas(16) Vector {
  static constexpr int kElements = 16 / sizeof(T);
  T at[kElements];
};

// Converts kColumns elements from column `first` on; there are zeros beyond the last column. kAligned: rows begin at
// multiples of 16 bytes, and have whole vectors.
template <bool kAligned, typename T>
__device__ void LoadFloats(const T* row, int first, int columns, float (&x)[kColumns]) {
  if constexpr (kAligned) {
    constexpr int kElements = Vector<T>::kElements;
#pragma unroll
    for (int i = 0; i < kColumns; i += kElements) {
      Vector<T> vector = {};
      if (first + i < columns) vector = *reinterpret_cast<const Vector<T>*>(row + first + i);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[i + j] = static_cast<float>(vector.at[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      x[i] = first + i < columns ? static_cast<float>(row[first + i]) : 0;
    }
  }
}

// Bits of magnitudes are in the order of magnitudes, those of NaN last.
__device__ uint32_t Largest(uint32_t largest, const float (&x)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffff);
  return largest;
}

// The largest value of all threads of the CTA.
__device__ uint32_t LargestOfBlock(uint32_t value) {
  __shared__ uint32_t largest[kMaxThreads / 32];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
  __syncthreads();  // those of all warps are there
  value =
      __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? largest[threadIdx.x % 32] : 0);
  return value;
}

// The scale of a row, and what divides by it.
struct Divisor {
  float scale;       // NaN if the row is not finite
  float lift;        // a power of two that keeps remainders away from where float32 ends
  float lifted;      // scale * lift
  float reciprocal;  // of that, rounded to the nearest

  __device__ Divisor(uint32_t largest, float most) {
    constexpr float kLeast = 0x1p-126f, kSmall = 0x1p-60f;
    scale = largest == 0 ? 1 : fmaxf(__fdiv_rn(__uint_as_float(largest), most), kLeast);
    if (largest >= kInfinity) scale = __uint_as_float(kNan);
    lift = scale < kSmall ? 0x1p64f : 1;
    lifted = scale * lift;
    reciprocal = __frcp_rn(lifted);
  }

  // x / scale, rounded to the nearest: the first correction leaves an error below one unit in the last place, from
  // which the second one gives what IEEE 754 asks for (Markstein, 1990). Quotients near 0, whose remainders underflow
  // nevertheless, are 0 in 8 bits whatever their last bits. Of -0 it is 0.
  __device__ float Quotient(float x) const {
    x *= lift;
    float quotient = x * reciprocal;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      quotient = fmaf(fmaf(-quotient, lifted, x), reciprocal, quotient);
    }
    return quotient;
  }
};

// Two values in the low 16 bits. No quotient is so far beyond the largest value that it has to be clipped, but that
// conversions to e4m3 saturate.
template <bool kFloat8>
__device__ uint32_t Round(float low, float high) {
  if constexpr (kFloat8) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  } else {
    constexpr float kInteger = 0x1.8p23f;  // the last bit of sums with it is 1
    return __byte_perm(__float_as_uint(low + kInteger), __float_as_uint(high + kInteger), 0x0040);
  }
}

template <bool kFloat8, bool kAligned>
__device__ void StoreUnit(const float (&x)[kColumns], const Divisor& divisor, uint8_t* to) {
  uint32_t words[kColumns / 4];
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    uint32_t pairs[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = 2 * i + j;  // stored beside the one 8 columns further
      pairs[j] = Round<kFloat8>(divisor.Quotient(x[column]), divisor.Quotient(x[column + 8]));
    }
    words[i] = isnan(divisor.scale) ? 0 : __byte_perm(pairs[0], pairs[1], 0x5410);
  }
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) to[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
  }
}

template <bool kFloat8>
constexpr float kMost = kFloat8 ? 448 : 127;

// CTAs that a multiprocessor has threads for: two on Hopper, the only architecture that runs them.
#if __CUDA_ARCH__ == 900
constexpr int kCtasPerSm = 2;
#else
constexpr int kCtasPerSm = 1;
#endif

// kUnits: units of a thread, in registers, which for one unit are few enough for all threads of a multiprocessor.
template <typename T, bool kFloat8, int kUnits>
__global__ void __launch_bounds__(kMaxThreads, kUnits == 1 ? kCtasPerSm : 1)
    QuantizeRowsKernel(const T* floats, const float*, uint8_t* values, float* scale, int columns,
                       int units) {
  LaunchDependents();
  const int64_t row = blockIdx.x;
  floats += row * columns;
  values += row * units * kColumns;
  float x[kUnits][kColumns];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * blockDim.x + threadIdx.x;
    if (unit >= units) break;
    LoadFloats<true>(floats, unit * kColumns, columns, x[i]);
    largest = Largest(largest, x[i]);
  }
  const Divisor divisor(LargestOfBlock(largest), kMost<kFloat8>);
  if (threadIdx.x == 0) scale[row] = divisor.scale;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * blockDim.x + threadIdx.x;
    if (unit >= units) break;
    StoreUnit<kFloat8, true>(x[i], divisor, values + int64_t{unit} * kColumns);
  }
}

// What is rounded of a unit.
template <bool kAligned, typename T>
__device__ void LoadUnit(const T* row, const float* factor, int unit, int columns,
                         float (&x)[kColumns]) {
  const int first = unit * kColumns;
  LoadFloats<kAligned>(row, first, columns, x);
  if (factor == nullptr) return;
  float factors[kColumns];
  LoadFloats<kAligned>(factor, first, columns, factors);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (first + i < columns) x[i] = __fdiv_rn(x[i], factors[i]);
  }
}

// Reads rows twice: those longer than registers hold, those that are not aligned, and those that are divided.
template <typename T, bool kFloat8, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    QuantizeLongRowsKernel(const T* floats, const float* factor, uint8_t* values, float* scale,
                           int columns, int units) {
  LaunchDependents();
  const int64_t row = blockIdx.x;
  floats += row * columns;
  values += row * units * kColumns;
  float x[kColumns];
  uint32_t largest = 0;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    LoadUnit<kAligned>(floats, factor, unit, columns, x);
    largest = Largest(largest, x);
  }
  const Divisor divisor(LargestOfBlock(largest), kMost<kFloat8>);
  if (threadIdx.x == 0) scale[row] = divisor.scale;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    LoadUnit<kAligned>(floats, factor, unit, columns, x);
    StoreUnit<kFloat8, kAligned>(x, divisor, values + int64_t{unit} * kColumns);
  }
}

template <typename T>
using KernelFunction = decltype(&QuantizeRowsKernel<T, true, 1>);

// `once`: whether rows may be read once, if registers hold them.
template <typename T, bool kFloat8>
KernelFunction<T> Find(int64_t units, bool aligned, bool once) {
  if (!aligned) return QuantizeLongRowsKernel<T, kFloat8, false>;
  if (!once || units > kMaxThreads * kMaxUnits) return QuantizeLongRowsKernel<T, kFloat8, true>;
  return units > kMaxThreads ? QuantizeRowsKernel<T, kFloat8, kMaxUnits>
                             : QuantizeRowsKernel<T, kFloat8, 1>;
}

// Launches without PDL: a kernel before the call may have written weights, for which the product does not wait.
template <typename T>
cudaError_t Launch(const QuantizeRows& problem, cudaStream_t stream) {
  const int64_t units = CeilDiv(problem.columns, kColumns);
  const bool aligned = IsAligned(problem.floats) && IsAligned(problem.factor) &&
                       IsAligned(problem.values) && problem.columns % Vector<T>::kElements == 0;
  const bool once = problem.factor == nullptr;
  const auto kernel = problem.to == ElementType::kE4m3 ? Find<T, true>(units, aligned, once)
                                                       : Find<T, false>(units, aligned, once);
  // Threads have equal numbers of units, but for the last warps.
  const int threads =
      static_cast<int>(CeilDiv(CeilDiv(units, CeilDiv(units, kMaxThreads)), 32)) * 32;
  constexpr int64_t kMostCtas = std::numeric_limits<int32_t>::max();
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < problem.rows && error == cudaSuccess; row += kMostCtas) {
    const LaunchConfig launch(std::min(problem.rows - row, kMostCtas), threads, 0, stream);
    error = cudaLaunchKernelEx(
        &launch.config, kernel, static_cast<const T*>(problem.floats) + row * problem.columns,
        problem.factor, static_cast<uint8_t*>(problem.values) + row * units * kColumns,
        problem.scale + row, static_cast<int>(problem.columns), static_cast<int>(units));
  }
  return error;
}

template <typename T, bool kFloat8>
cudaError_t Prepare() {
  for (const auto kernel :
       {Find<T, kFloat8>(1, true, true), Find<T, kFloat8>(kMaxThreads * kMaxUnits, true, true),
        Find<T, kFloat8>(1, true, false), Find<T, kFloat8>(1, false, false)}) {
    const cudaError_t error = PreferSharedMemory(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t PrepareQuantizeRows() {
  for (const auto prepare :
       {Prepare<float, false>, Prepare<float, true>, Prepare<__nv_bfloat16, false>,
        Prepare<__nv_bfloat16, true>, Prepare<__half, false>, Prepare<__half, true>}) {
    const cudaError_t error = prepare();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchQuantizeRows(const QuantizeRows& problem, cudaStream_t stream) {
  const auto launch = problem.from == ElementType::kF32    ? Launch<float>
                      : problem.from == ElementType::kBf16 ? Launch<__nv_bfloat16>
                                                           : Launch<__half>;
  return launch(problem, stream);
}

}  // namespace jaxlowbit
