// SPDX-License-Identifier: Apache-2.0

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "cuda/check/device_problem.h"
#include "cuda/check/random.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/extents.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/sm80/plan.h"
#include "cuda/limits.h"

namespace jaxlowbit::check {
namespace {

constexpr int kThreads = 256;
constexpr float kInt8Unit = 30;  // the int8 value for 1

// The grid size for kernels whose threads stride over `count` elements.
int64_t Ctas(int64_t count) { return std::clamp<int64_t>(CeilDiv(count, kThreads), 1, 4096); }

__device__ float Load(const void* data, ElementType type, int64_t i) {
  switch (type) {
    case ElementType::kF32:
      return static_cast<const float*>(data)[i];
    case ElementType::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case ElementType::kF16:
      return __half2float(static_cast<const __half*>(data)[i]);
    case ElementType::kE8m0:
      return static_cast<float>(static_cast<const __nv_fp8_e8m0*>(data)[i]);
    case ElementType::kE4m3:
      return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[i]);
    case ElementType::kInt8:
      return static_cast<const int8_t*>(data)[i];
    case ElementType::kInt32:  // the bound covers values that float32 does not represent
      return static_cast<float>(static_cast<const int32_t*>(data)[i]);
    case ElementType::kSuper:  // not used here
      break;
  }
  return 0.0f;
}

__device__ void Store(void* data, ElementType type, int64_t i, float value) {
  switch (type) {
    case ElementType::kF32:
      static_cast<float*>(data)[i] = value;
      return;
    case ElementType::kBf16:
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
      return;
    case ElementType::kF16:
      static_cast<__half*>(data)[i] = __float2half_rn(value);
      return;
    case ElementType::kE8m0:
      static_cast<__nv_fp8_e8m0*>(data)[i] = __nv_fp8_e8m0(value);
      return;
    case ElementType::kE4m3:
      static_cast<__nv_fp8_e4m3*>(data)[i] = __nv_fp8_e4m3(value);
      return;
    case ElementType::kInt8:
      static_cast<int8_t*>(data)[i] =
          static_cast<int8_t>(fminf(fmaxf(rintf(value * kInt8Unit), -127), 127));
      return;
    case ElementType::kInt32:
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
      return;
    case ElementType::kSuper:
      return;
  }
}

enum class Fill { kNormal, kScale, kZero, kIndex, kWords };

// Random scale number `i`, usually small. If `large` is not 0, some of the first 8-bit scales are `large`, to test
// kernels that multiply by large scales separately.
__device__ float Scale(int64_t i, uint64_t x, ElementType type, float large) {
  constexpr int64_t kFirst = 1024;
  const float fraction = Hash(x) * 0x1p-32f;
  const bool is_large = large > 0 && i < kFirst && Hash(x) % 64 == 0;
  switch (type) {
    case ElementType::kE8m0:
      return is_large ? large : ldexpf(0x1p-8f, static_cast<int>(3 * fraction));
    case ElementType::kE4m3:
      return is_large ? large : (1 + fraction) * ldexpf(0x1p-7f, static_cast<int>(Hash(x) % 4));
    case ElementType::kInt8:  // 1 to 16 as Store rounds
      return static_cast<float>(1 + Hash(x) % 16) / kInt8Unit;
    default:
      return (1 + fraction) * 0x1p-8f;
  }
}

// A random byte of an 8-bit float: finite, and below 2 for 5 exponent bits.
__device__ uint32_t FloatByte(uint32_t byte, Codebook codebook) {
  if (codebook == Codebook::kE5m2) return byte & 0xbf;
  return (byte & 0x7f) == 0x7f ? byte - 1 : byte;
}

__global__ void FillKernel(void* data, Fill fill, ElementType type, int64_t count, uint64_t seed,
                           int modulus, Codebook codebook) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const uint64_t x = i + (seed << 40);
    switch (fill) {
      case Fill::kNormal:
        Store(data, type, i, Normal(x));
        break;
      case Fill::kScale:
        Store(data, type, i, Scale(i, x, type, static_cast<float>(modulus)));
        break;
      case Fill::kZero:
        static_cast<uint8_t*>(data)[i] = Hash(x) % modulus;
        break;
      case Fill::kIndex:  // sometimes out of range, to test clamping
        static_cast<int32_t*>(data)[i] = static_cast<int32_t>(Hash(x) % (modulus + 2)) - 1;
        break;
      case Fill::kWords: {
        uint32_t word = Hash(x);
        if (codebook == Codebook::kE4m3 || codebook == Codebook::kE5m2) {
          const uint32_t bytes = word;
          word = 0;
          for (int at = 0; at < 32; at += 8) {
            word |= FloatByte(bytes >> at & 255, codebook) << at;
          }
        }
        static_cast<uint32_t*>(data)[i] = word;
        break;
      }
    }
  }
}

void Random(const DeviceBuffer& buffer, Fill fill, ElementType type, int64_t count, uint64_t seed,
            int modulus = 0, Codebook codebook = Codebook::kNone) {
  if (count == 0) return;
  FillKernel<<<Ctas(count), kThreads>>>(buffer.data(), fill, type, count, seed, modulus, codebook);
  Check(cudaGetLastError(), "FillKernel");
}

// The position of a value in an atom, as digits of k and n: n = 16 w + 8 h + g, k = 16 (2 S + s) + 8 v + 2 t + e.
struct Digits {
  int S, s, v, e, h;
};

// A value's bits in one plane with slots of `bits` bits. `slots`: the digits of a slot number, highest first.
__device__ int PlaneBits(const uint32_t* lane, int bits, const char* slots, const Digits& d) {
  int slot = 0;
  for (int i = 0; i < 5; ++i) {
    const char c = slots[i];
    slot = 2 * slot + (c == 'S' ? d.S : c == 's' ? d.s : c == 'v' ? d.v : c == 'e' ? d.e : d.h);
  }
  return lane[slot * bits / 32] >> slot * bits % 32 & ((1 << bits) - 1);
}

// The quantized value of element (k, n), by the table of docs/layout.md, independent of the kernels' code.
__device__ int Code(const QuantizedMatmul& p, const uint32_t* words, int64_t k, int64_t n) {
  const int64_t k_blocks = (p.k + 63) / 64;
  const uint32_t* atom = words + (n / 64 * k_blocks + k / 64) * (128 * p.bits);
  const int nn = n % 64, kk = k % 64;
  const Digits d = {kk / 32, kk / 16 % 2, kk / 8 % 2, kk % 2, nn / 8 % 2};
  const int lane = nn / 16 * 32 + nn % 8 * 4 + kk / 2 % 4;
  const auto plane = [&](int bits, int shift, const char* slots) {
    return PlaneBits(atom + 128 * shift + lane * bits, bits, slots, d) << shift;
  };
  switch (p.bits) {
    case 1:
      return plane(1, 0, "eSsvh");
    case 2:
      return plane(2, 0, "Sesvh");
    case 3:
      return plane(2, 0, "Sevhs") + plane(1, 2, "evhSs");
    case 4:
      return plane(4, 0, "Ssevh");
    case 5:
      return plane(4, 0, "Ssehv") + plane(1, 4, "ehSsv");
    case 6:
      return plane(4, 0, "Ssehv") + plane(2, 4, "Sehsv");
    case 7:
      return plane(4, 0, "Ssehv") + plane(2, 4, "Sehsv") + plane(1, 6, "ehSsv");
    default:
      return plane(8, 0, "Ssveh");
  }
}

struct Bounded {
  double value, bound;  // bound on the error of the kernel's float32 value
};

// Computes element (row, column) of the product with weight number `position` of the batch: the exact sum, in double.
// `numbers`: the codebook. `half_steps`: maximum steps of 16 products accumulated in float16; 0 for none.
__device__ Bounded Sum(const QuantizedMatmul& p, const Buffers& b, const float* numbers,
                       int half_steps, int64_t row, int64_t column, int64_t position) {
  const int64_t lhs_columns = p.transposed ? p.n : p.k;
  const int64_t lhs_row = p.listed_per_row > 0 ? row / p.listed_per_row : row;
  const int64_t weight =
      WeightNumber(b.index == nullptr ? position : b.index[position], p.num_weights);
  const int64_t n_blocks = (p.n + 63) / 64, k_blocks = (p.k + 63) / 64;
  const int64_t size = p.group_size < 0 ? k_blocks * 64 : p.group_size;
  const int64_t groups = (k_blocks * 64 + size - 1) / size;
  const uint32_t* words = b.packed + weight * n_blocks * k_blocks * 128 * p.bits;
  double sum = 0, magnitude = 0, lhs_sum = 0, half_magnitude = 0;
  for (int64_t j = 0; j < lhs_columns; ++j) {
    const int64_t k = p.transposed ? column : j, n = p.transposed ? j : column;
    const int64_t group = ((weight * n_blocks + n / 64) * groups + k / size) * 64 +
                          GroupPosition(static_cast<int>(n % 64));
    int zero = p.zero == ZeroKind::kNone ? 1 << (p.bits - 1) : 0;
    if (p.zero == ZeroKind::kInteger) zero = static_cast<const uint8_t*>(b.zero)[group];
    const double offset = p.zero == ZeroKind::kFloat ? Load(b.zero, p.scale, group) : 0.0f;
    const int code = Code(p, words, k, n);
    const double value = p.codebook == Codebook::kNone ? code - zero : double{numbers[code]};
    const bool scaled = !p.is_integer_matmul() || p.scale == ElementType::kInt8;
    const double w = value * (scaled ? double{Load(b.scale, p.scale, group)} : 1) + offset;
    int64_t at = j;  // in a row of lhs
    if (p.permuted_parts > 0) {
      const int64_t part = p.k / p.permuted_parts;
      at = j / part * part + min(max(int64_t{b.permutation[j]}, int64_t{0}), part - 1);
    }
    if (Is8Bit(p.lhs)) at = j / 16 * 16 + j % 8 * 2 + j / 8 % 2;  // interleaved (problem.h)
    const double x = Load(b.lhs, p.lhs, lhs_row * lhs_columns + at);
    const double term = w * x;
    lhs_sum += fabs(x);
    sum += term;
    magnitude += fabs(term);
    // Each step, beginning with the product's own, rounds the accumulator once or twice.
    if (half_steps > 0) half_magnitude += 2 * (half_steps - j / 16 % half_steps) * fabs(term);
  }
  const double u_lhs = p.floats() == ElementType::kBf16 ? 0x1p-8 : 0x1p-11;
  // The rounding of weights, or of float8 sums: tensor cores keep 13 bits below the largest product.
  const double u = p.scale_accumulators || p.lhs == ElementType::kInt8 ? 0x1p-24 : u_lhs;
  // Half the spacing of subnormals, for subnormal weights.
  const double tiny = p.floats() == ElementType::kBf16 ? 0x1p-134 : 0x1p-25;
  const double half = 0x1p-11 * half_magnitude + (half_steps > 0 ? lhs_columns * 0x1p-28 : 0);
  double bound = (u + lhs_columns * 0x1p-24) * magnitude + tiny * lhs_sum + half;
  if (b.lhs_scale != nullptr) {
    sum *= b.lhs_scale[row];
    bound = bound * b.lhs_scale[row] + 0x1p-22 * fabs(sum);
  }
  if (p.epilogue.units > 0) {
    const double unit = b.unit[p.epilogue.units == 1 ? weight : weight * p.epilogue.units + column];
    sum *= unit;
    bound = bound * unit + 0x1p-23 * fabs(sum);
  }
  if (b.bias == nullptr) return {sum, bound};
  const double bias = Load(b.bias, p.epilogue.bias, position * p.n + column);
  return {sum + bias, bound + 0x1p-24 * (fabs(sum) + fabs(bias))};
}

__device__ double Exact(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x / (1 + exp(-x));
    case Activation::kGelu:
      return 0.5 * x * erfc(-sqrt(0.5) * x);
    case Activation::kGeluTanh:
      return x / (1 + exp(-sqrt(8 / 3.14159265358979324) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return fmax(x, 0.0);
    case Activation::kGptOss:
      x = fmin(x, static_cast<double>(kGptOssLimit));
      return x / (1 + exp(-1.702 * x));
  }
  return x;
}

// The smallest number that rounds to infinity.
__device__ double MinOverflow(ElementType type) {
  switch (type) {
    case ElementType::kF16:
      return 65520;
    case ElementType::kBf16:
      return 0x1.ffp127;
    default:
      return 0x1.ffffffp127;
  }
}

// Each thread checks the first of `step` outputs. *worst: maximum ratio of error to bound, as bits.
__global__ void CompareKernel(QuantizedMatmul p, Buffers b, const float* numbers, int64_t step,
                              int half_steps, unsigned long long* worst) {
  const int64_t out_columns = p.transposed ? p.k : p.n;
  const int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * step;
  if (i >= p.batch * p.m * out_columns) return;
  const int64_t column = i % out_columns, row = i / out_columns, batch = row / p.m;
  const Epilogue& e = p.epilogue;
  Bounded result = Sum(p, b, numbers, half_steps, row, column, e.gated ? 2 * batch : batch);
  if (e.activation != Activation::kNone) {
    // Slopes of activations are at most 1.13; float32 formulas are accurate to 2^-20 of the argument.
    result.bound = 1.13 * result.bound + 0x1p-20 * fabs(result.value);
    result.value = Exact(e.activation, result.value);
  }
  if (e.gated) {
    Bounded up = Sum(p, b, numbers, half_steps, row, column, 2 * batch + 1);
    if (e.activation == Activation::kGptOss) {
      const double limit = kGptOssLimit;
      up.value = fmin(fmax(up.value, -limit), limit) + 1;
    }
    result.bound = fabs(result.value) * up.bound + fabs(up.value) * result.bound +
                   up.bound * result.bound + 0x1p-24 * fabs(result.value * up.value);
    result.value *= up.value;
  }
  if (b.residual != nullptr) {
    const double residual = Load(b.residual, e.residual, i);
    result.value += residual;
    result.bound += 0x1p-24 * (fabs(result.value) + fabs(residual));
  }
  const double u_lhs = p.floats() == ElementType::kBf16 ? 0x1p-8 : 0x1p-11;
  const double u_out = p.out == p.floats() ? u_lhs : 0x1p-24;
  const double tiny = p.floats() == ElementType::kBf16 ? 0x1p-134 : 0x1p-25;
  const double bound = result.bound + u_out * (fabs(result.value) + result.bound) + tiny;
  const double out = Load(b.out, p.out, i);
  if (isinf(out) && signbit(out) == signbit(result.value) &&
      fabs(result.value) + result.bound >= MinOverflow(p.out)) {
    return;
  }
  double ratio = fabs(out - result.value) / bound;
  if (!(ratio < 1e300)) ratio = 1e300;
  atomicMax(worst, static_cast<unsigned long long>(__double_as_longlong(ratio)));
}

// Sums a hash of each 16 bits and their position.
__global__ void DigestKernel(const uint16_t* data, int64_t count, unsigned long long* digest) {
  unsigned long long sum = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    sum += Hash(static_cast<uint64_t>(i) << 16 | data[i]);
  }
  atomicAdd(digest, sum);
}

int64_t Outputs(const QuantizedMatmul& p) { return p.batch * p.m * p.out_columns(); }

int64_t Biases(const QuantizedMatmul& p) { return p.batch * p.weights_per_element() * p.n; }

int64_t Groups(const QuantizedMatmul& p) { return p.num_weights * GroupValues(p); }

// The numbers of a codebook; for a table, quantiles of a normal distribution as in nf4.
std::vector<float> NumbersOf(const QuantizedMatmul& p) {
  std::vector<float> numbers(p.codebook == Codebook::kNone ? 0 : 1 << p.bits);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto code = static_cast<unsigned char>(i);
    const double place = (static_cast<double>(i) + 0.5) / static_cast<double>(numbers.size());
    if (p.codebook == Codebook::kTable) {
      numbers[i] = static_cast<float>(std::tan(2.5 * (place - 0.5)) / 3.0);
    } else if (p.codebook == Codebook::kE2m1) {
      numbers[i] = __half2float(
          __half(__nv_cvt_fp4_to_halfraw(static_cast<__nv_fp4_storage_t>(code), __NV_E2M1)));
    } else {
      const auto kind = p.codebook == Codebook::kE4m3 ? __NV_E4M3 : __NV_E5M2;
      numbers[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
    }
  }
  return numbers;
}

int64_t AllPackedBytes(const QuantizedMatmul& p) { return p.num_weights * PackedBytes(p); }

}  // namespace

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "driver: %s failed: %s: %s %s\n", what, cudaGetErrorName(error),
               cudaGetErrorString(error), PopLoadError().c_str());
  std::exit(2);
}

DeviceBuffer::DeviceBuffer(int64_t bytes) : bytes_(bytes) {
  Check(cudaMalloc(&data_, std::max<int64_t>(bytes, 1)), "cudaMalloc");
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

int64_t UnitsOf(const QuantizedMatmul& problem) {
  if (problem.transposed || problem.is_integer_matmul()) return 0;
  if (problem.scale == ElementType::kE4m3) return Is8Bit(problem.lhs) ? 0 : 1;
  if (problem.scale != ElementType::kInt8) return 0;
  return Is8Bit(problem.lhs) ? problem.n_blocks() * kAtom : problem.n;
}

int64_t WeightBytes(const QuantizedMatmul& problem) {
  return AllPackedBytes(problem) + Groups(problem) * (problem.scale_bytes() + problem.zero_bytes());
}

DeviceProblem::DeviceProblem(const QuantizedMatmul& problem, const Optional& optional, int copies,
                             uint64_t seed, const RowGroups& groups)
    : problem_(problem),
      optional_(optional),
      groups_(groups),
      codebook_(NumbersOf(problem)),
      numbers_(static_cast<int64_t>(codebook_.size() * sizeof(float))),
      lhs_(LhsExtent(problem, Buffers{}).bytes),
      lhs_scale_(Is8Bit(problem.lhs) ? problem.batch * problem.m * 4 : 0),
      packed_(copies * AllPackedBytes(problem)),
      scale_(copies * Groups(problem) * problem.scale_bytes()),
      unit_(problem.num_weights * problem.epilogue.units * 4),
      zero_(copies * Groups(problem) * problem.zero_bytes()),
      index_(optional.index ? problem.batch * problem.weights_per_element() * 4 : 0),
      permutation_(problem.permuted_parts > 0 ? problem.k * 4 : 0),
      gathered_(problem.permuted_parts > 0 ? lhs_.bytes() : 0),
      bias_(optional.bias ? Biases(problem) * SizeOf(problem.epilogue.bias) : 0),
      residual_(optional.residual ? Outputs(problem) * SizeOf(problem.epilogue.residual) : 0),
      out_(Outputs(problem) * SizeOf(problem.out)),
      workspace_(kMaxWorkspaceBytes),
      packed_stride_(packed_.bytes() / copies),
      scale_stride_(scale_.bytes() / copies),
      zero_stride_(zero_.bytes() / copies) {
  const ElementType none = ElementType::kF32;
  Random(lhs_, Fill::kNormal, problem.lhs, lhs_.bytes() / SizeOf(problem.lhs), seed);
  Random(lhs_scale_, Fill::kScale, none, lhs_scale_.bytes() / 4, seed + 8);
  Random(unit_, Fill::kScale, none, unit_.bytes() / 4, seed + 9);
  Check(cudaMemcpy(numbers_.data(), codebook_.data(), numbers_.bytes(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  Random(packed_, Fill::kWords, none, packed_.bytes() / 4, seed + 1, 0, problem.codebook);
  // Wider numbers times large scales exceed the range of float16.
  const bool half = problem.lhs == ElementType::kF16;
  // Problems with copies are timed, and large scales would dominate the time.
  const int large_scale = copies > 1                            ? 0
                          : !half                               ? 512
                          : problem.codebook == Codebook::kE2m1 ? 4
                                                                : 0;
  Random(scale_, Fill::kScale, problem.scale, copies * Groups(problem), seed + 2, large_scale);
  if (problem.zero == ZeroKind::kFloat) {
    Random(zero_, Fill::kScale, problem.scale, copies * Groups(problem), seed + 3);
  } else {
    Random(zero_, Fill::kZero, none, zero_.bytes(), seed + 3, 1 << problem.bits);
  }
  Random(index_, Fill::kIndex, none, index_.bytes() / 4, seed + 4,
         static_cast<int>(problem.num_weights));
  Random(permutation_, Fill::kIndex, none, permutation_.bytes() / 4, seed + 7,
         static_cast<int>(problem.k / std::max<int64_t>(problem.permuted_parts, 1)));
  const Epilogue& e = problem.epilogue;
  Random(bias_, Fill::kNormal, e.bias, bias_.bytes() / SizeOf(e.bias), seed + 5);
  Random(residual_, Fill::kNormal, e.residual, residual_.bytes() / SizeOf(e.residual), seed + 6);
}

Buffers DeviceProblem::buffers(int copy) const {
  const auto at = [&](const DeviceBuffer& buffer, int64_t stride) {
    return static_cast<uint8_t*>(buffer.data()) + copy * stride;
  };
  Buffers buffers;
  buffers.lhs = lhs_.data();
  if (Is8Bit(problem_.lhs) && !problem_.is_integer_matmul()) {
    buffers.lhs_scale = static_cast<const float*>(lhs_scale_.data());
  }
  buffers.packed = reinterpret_cast<const uint32_t*>(at(packed_, packed_stride_));
  buffers.scale = at(scale_, scale_stride_);
  buffers.unit = problem_.epilogue.units > 0 ? static_cast<const float*>(unit_.data()) : nullptr;
  buffers.zero = problem_.zero == ZeroKind::kNone ? nullptr : at(zero_, zero_stride_);
  buffers.codebook = codebook_.empty() ? nullptr : codebook_.data();
  buffers.index = optional_.index ? static_cast<const int32_t*>(index_.data()) : nullptr;
  buffers.group_sizes = groups_.numbers;
  buffers.bias = optional_.bias ? bias_.data() : nullptr;
  buffers.residual = optional_.residual ? residual_.data() : nullptr;
  if (problem_.permuted_parts > 0) {
    buffers.permutation = static_cast<const int32_t*>(permutation_.data());
    buffers.gathered = gathered_.data();
  }
  buffers.out = out_.data();
  buffers.workspace = workspace_.data();
  return buffers;
}

void DeviceProblem::Poison() const {
  Check(cudaMemset(out_.data(), 0xff, out_.bytes()), "cudaMemset");
  Check(cudaMemset(workspace_.data(), 0xff, workspace_.bytes()), "cudaMemset");
}

double DeviceProblem::ErrorOverBound(int copy, int64_t max_samples) const {
  const int64_t outputs = Outputs(problem_);
  if (outputs == 0) return 0;
  // A step coprime to the number of columns visits all columns.
  int64_t step = std::max<int64_t>(outputs / max_samples, 1);
  while (std::gcd(step, problem_.out_columns()) != 1) ++step;
  DeviceBuffer worst(8);
  Check(cudaMemset(worst.data(), 0, 8), "cudaMemset");
  const int half_steps =
      problem_.may_accumulate_float16() ? sm80::BlockK(problem_.bits) / sm80::kMinGroupSize : 0;
  QuantizedMatmul problem = problem_;
  Buffers operands = buffers(copy);
  if (problem.is_ragged()) {  // as a batch of rows with a weight each
    problem.batch = problem.m, problem.m = 1;
    operands.index = groups_.weights;
  }
  CompareKernel<<<CeilDiv(CeilDiv(outputs, step), kThreads), kThreads>>>(
      problem, operands, static_cast<const float*>(numbers_.data()), step, half_steps,
      static_cast<unsigned long long*>(worst.data()));
  Check(cudaGetLastError(), "CompareKernel");
  double ratio = 0;
  Check(cudaMemcpy(&ratio, worst.data(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return ratio;
}

uint64_t DeviceProblem::Digest() const {
  const int64_t count = out_.bytes() / 2;
  DeviceBuffer digest(8);
  Check(cudaMemset(digest.data(), 0, 8), "cudaMemset");
  DigestKernel<<<Ctas(count), kThreads>>>(static_cast<const uint16_t*>(out_.data()), count,
                                          static_cast<unsigned long long*>(digest.data()));
  Check(cudaGetLastError(), "DigestKernel");
  uint64_t sum = 0;
  Check(cudaMemcpy(&sum, digest.data(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return sum;
}

std::string Describe(const QuantizedMatmul& p, const Optional& optional) {
  const auto name = [](ElementType type) {
    constexpr const char* kNames[] = {"f32",  "bf16", "f16",   "e8m0",
                                      "e4m3", "int8", "super", "int32"};
    return kNames[static_cast<int>(type)];
  };
  char text[160];
  std::snprintf(text, sizeof(text), "m=%-5lld n=%-6lld k=%-6lld w%d g%-4lld %s scale %s%s out %s",
                static_cast<long long>(p.m), static_cast<long long>(p.n),
                static_cast<long long>(p.k), p.bits, static_cast<long long>(p.group_size),
                name(p.lhs), name(p.scale),
                p.zero == ZeroKind::kInteger ? " zero"
                : p.zero == ZeroKind::kFloat ? " float zero"
                                             : "",
                name(p.out));
  return std::string(text) +
         (p.transposed           ? " transposed"
          : p.scale_accumulators ? " scale sums"
          : p.accumulate_float16 ? " half sums"
                                 : "") +
         (p.codebook == Codebook::kNone
              ? ""
              : std::string(" ") + kCodebookNames[static_cast<int>(p.codebook)]) +
         (p.batch > 1 ? " batch " + std::to_string(p.batch) : "") +
         (p.is_ragged() ? " of " + std::to_string(p.experts()) + " experts" : "") +
         (p.listed_per_row > 0 ? " listed" : "") + (p.epilogue.gated ? " gated" : "") +
         (p.epilogue.activation == Activation::kNone
              ? ""
              : " activation " + std::to_string(static_cast<int>(p.epilogue.activation))) +
         (p.epilogue.units > 0 ? " unit" : "") +
         (optional.bias ? std::string(" bias ") + name(p.epilogue.bias) : "") +
         (optional.residual ? std::string(" residual ") + name(p.epilogue.residual) : "");
}

}  // namespace jaxlowbit::check
