// SPDX-License-Identifier: Apache-2.0
//
// quantize_rows: per row, scale = max(max|x| / max_value, 2^-126) and values = round(x / scale), ties to even, where x
// is floats or floats / factor and max_value is 127 (int8) or 448 (e4m3). A row of zeros has scale 1; a row with NaN or
// infinity has scale NaN and values 0 (jaxlowbit/_core/activations.py).
//
// Bound: memory; for small m, latency until the product starts, which is already launched (PDL). So a CTA processes one
// row and keeps it in registers between the maximum and the values. A thread has units of 16 columns, whose values are
// one 16-byte store.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "cuda/device/pdl.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/ops/quantize_rows.h"
#include "cuda/ops/rounded_row.cuh"

namespace jaxlowbit {
namespace {

constexpr int kColumns = static_cast<int>(kInterleavedColumns);  // per unit
constexpr int kMaxUnits = 2;                                     // per thread, in registers

template <typename T>
struct alignas(16) Vector {
  static constexpr int kElements = 16 / sizeof(T);
  T at[kElements];
};

// Loads and converts kColumns elements from column `first` on, zeros beyond the last column. kAligned: rows begin at
// multiples of 16 bytes and consist of whole vectors.
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

// Maximum of the magnitude bits (MagnitudeBits), which order like magnitudes.
__device__ uint32_t Largest(uint32_t largest, const float (&x)[kColumns]) {
#pragma unroll
  for (float value : x) largest = max(largest, MagnitudeBits(value));
  return largest;
}

// Stores `count` words of 4 bytes.
template <bool kAligned, int kCount>
__device__ void StoreWords(const uint32_t (&words)[kCount], uint8_t* to) {
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      reinterpret_cast<uint4*>(to)[i / 4] =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) to[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
  }
}

// Output format: kind of 8-bit values, stored as bfloat16 in column order (kIsWide) or as bytes, interleaved.
template <bool kIsFloat8, bool kIsWide>
struct Rounding {
  static constexpr bool kFloat8 = kIsFloat8, kWide = kIsWide;
  static constexpr float kMax = kMaxValue<kFloat8>;
  static constexpr int kValueBytes = kWide ? 2 : 1;
};

template <class R, bool kAligned>
__device__ void StoreUnit(const float (&x)[kColumns], const Divisor& divisor, uint8_t* to) {
  uint32_t words[kColumns * R::kValueBytes / 4];
  const bool finite = !isnan(divisor.scale);
  if constexpr (R::kWide) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float low = divisor.Quotient(x[2 * i]), high = divisor.Quotient(x[2 * i + 1]);
      words[i] = finite ? RoundWide<R::kFloat8>(low, high) : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      uint32_t pairs[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 2 * i + j;  // stored next to column + 8
        pairs[j] = Round<R::kFloat8>(divisor.Quotient(x[column]), divisor.Quotient(x[column + 8]));
      }
      words[i] = finite ? __byte_perm(pairs[0], pairs[1], 0x5410) : 0;
    }
  }
  StoreWords<kAligned>(words, to);
}

template <class R>
constexpr int kUnitBytes = kColumns * R::kValueBytes;

// Two CTAs fit an SM of Hopper, the only architecture that runs these kernels.
#if __CUDA_ARCH__ == 900
constexpr int kCtasPerSm = 2;
#else
constexpr int kCtasPerSm = 1;
#endif

// kUnits: units per thread, in registers. With one unit, registers allow full occupancy.
template <typename T, class R, int kUnits>
__global__ void __launch_bounds__(kMaxThreads, kUnits == 1 ? kCtasPerSm : 1)
    QuantizeRowsKernel(const T* floats, const float*, uint8_t* values, float* scale, int columns,
                       int units, bool early) {
  if (early) LaunchDependents();
  WaitForPreviousKernels();
  const int64_t row = blockIdx.x;
  floats += row * columns;
  values += row * units * kUnitBytes<R>;
  float x[kUnits][kColumns];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * blockDim.x + threadIdx.x;
    if (unit >= units) break;
    LoadFloats<true>(floats, unit * kColumns, columns, x[i]);
    largest = Largest(largest, x[i]);
  }
  const Divisor divisor(BlockMax(largest), R::kMax);
  if (!early) LaunchDependents();
  if (threadIdx.x == 0) scale[row] = divisor.scale;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * blockDim.x + threadIdx.x;
    if (unit >= units) break;
    StoreUnit<R, true>(x[i], divisor, values + int64_t{unit} * kUnitBytes<R>);
  }
}

// Loads the inputs of a unit: floats, or floats / factor.
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

// Reads rows twice, for rows that are too long for registers, unaligned, or divided by factors.
template <typename T, class R, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    QuantizeLongRowsKernel(const T* floats, const float* factor, uint8_t* values, float* scale,
                           int columns, int units, bool early) {
  if (early) LaunchDependents();
  WaitForPreviousKernels();
  const int64_t row = blockIdx.x;
  floats += row * columns;
  values += row * units * kUnitBytes<R>;
  float x[kColumns];
  uint32_t largest = 0;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    LoadUnit<kAligned>(floats, factor, unit, columns, x);
    largest = Largest(largest, x);
  }
  const Divisor divisor(BlockMax(largest), R::kMax);
  if (!early) LaunchDependents();
  if (threadIdx.x == 0) scale[row] = divisor.scale;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    LoadUnit<kAligned>(floats, factor, unit, columns, x);
    StoreUnit<R, kAligned>(x, divisor, values + int64_t{unit} * kUnitBytes<R>);
  }
}

template <typename T>
using KernelFunction = decltype(&QuantizeRowsKernel<T, Rounding<true, true>, 1>);

// `once`: rows may be read once if they fit the registers.
template <typename T, class R>
KernelFunction<T> Find(int64_t units, bool aligned, bool once) {
  if (!aligned) return QuantizeLongRowsKernel<T, R, false>;
  if (!once || units > kMaxThreads * kMaxUnits) return QuantizeLongRowsKernel<T, R, true>;
  return units > kMaxThreads ? QuantizeRowsKernel<T, R, kMaxUnits> : QuantizeRowsKernel<T, R, 1>;
}

template <typename T>
KernelFunction<T> Find(bool float8, bool wide, int64_t units, bool aligned, bool once) {
  const auto find = float8 ? wide ? Find<T, Rounding<true, true>> : Find<T, Rounding<true, false>>
                    : wide ? Find<T, Rounding<false, true>>
                           : Find<T, Rounding<false, false>>;
  return find(units, aligned, once);
}

template <typename T>
cudaError_t Launch(const QuantizeRows& problem, cudaStream_t stream) {
  const int64_t units = CeilDiv(problem.columns, kColumns);
  const bool aligned = IsAligned(problem.floats) && IsAligned(problem.factor) &&
                       IsAligned(problem.values) && problem.columns % Vector<T>::kElements == 0;
  const bool once = problem.factor == nullptr;
  const auto kernel = Find<T>(problem.to == ElementType::kE4m3, problem.wide, units, aligned, once);
  // All threads have the same number of units, except in the last warps.
  const int threads =
      static_cast<int>(CeilDiv(CeilDiv(units, CeilDiv(units, kMaxThreads)), 32)) * 32;
  constexpr int64_t kMaxCtas = std::numeric_limits<int32_t>::max();
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < problem.rows && error == cudaSuccess; row += kMaxCtas) {
    const LaunchConfig launch(std::min(problem.rows - row, kMaxCtas), threads, 0, stream,
                              problem.pdl);
    error = cudaLaunchKernelEx(
        &launch.config, kernel, static_cast<const T*>(problem.floats) + row * problem.columns,
        problem.factor,
        static_cast<uint8_t*>(problem.values) + row * units * kColumns * (problem.wide ? 2 : 1),
        problem.scale + row, static_cast<int>(problem.columns), static_cast<int>(units),
        problem.early);
  }
  return error;
}

template <typename T>
cudaError_t Prepare() {
  for (bool float8 : {false, true}) {
    for (bool wide : {false, true}) {
      for (const auto kernel :
           {Find<T>(float8, wide, 1, true, true),
            Find<T>(float8, wide, kMaxThreads * kMaxUnits, true, true),
            Find<T>(float8, wide, 1, true, false), Find<T>(float8, wide, 1, false, false)}) {
        const cudaError_t error = PreferSharedMemory(reinterpret_cast<const void*>(kernel));
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t PrepareQuantizeRows() {
  for (const auto prepare : {Prepare<float>, Prepare<__nv_bfloat16>, Prepare<__half>}) {
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
