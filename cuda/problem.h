// SPDX-License-Identifier: Apache-2.0
//
// The problem as a value: everything that choosing and running a kernel may depend on. Includes no
// XLA, no Python and no CUDA, so the CPU kernel, the handlers, the driver and the tests share it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAXLOWBIT_HOST_DEVICE __host__ __device__
#else
#define JAXLOWBIT_HOST_DEVICE
#endif

namespace jaxlowbit {

// Rows and columns of the packed layout's atom (docs/layout.md).
inline constexpr int64_t kAtom = 64;

enum class ElementType { kF32, kBf16, kF16 };
enum class ZeroKind { kNone, kInteger, kFloat };
enum class Activation { kNone, kSilu, kGelu, kGeluTanh, kRelu };

inline constexpr int64_t SizeOf(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }
inline constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What becomes of sums before they are rounded to the type of out, in float32:
// activation(sum + bias) + residual, or, gated, activation(gate + bias) * (up + bias) + residual.
struct Epilogue {
  Activation activation = Activation::kNone;
  // Weights are pairs: element b of the batch has weights 2 b, the gate, and 2 b + 1, up, or those that
  // index lists there.
  bool gated = false;
  // Of Buffers::bias and residual, where there are any: the type of lhs, or float32.
  ElementType bias = ElementType::kF32, residual = ElementType::kF32;
};

// out[b] = lhs[b] @ weight[index[b]] for b < batch, with lhs (m, k) and a packed (k, n) weight; or,
// transposed, out[b] = lhs[b] @ weight[index[b]]^T, with lhs (m, n).
struct QuantizedMatmul {
  int64_t batch = 1;
  int64_t num_weights = 1;  // weights that `packed` holds
  int64_t m = 0, n = 0, k = 0;
  int bits = 4;
  int64_t group_size = -1;  // along k; -1: one group
  ElementType lhs = ElementType::kBf16;
  ElementType scale = ElementType::kBf16;
  ElementType out = ElementType::kBf16;
  ZeroKind zero = ZeroKind::kNone;
  bool transposed = false;
  // Weights are not rounded to the type of lhs: exact integers are multiplied, and each group's sum
  // scaled in float32. For float32 activations, which arrive in bf16 parts that add up to them.
  bool scale_sums = false;
  // Whether a kernel may add products of float16 in float16, for as much of k as its page says. None
  // has to, and for other lhs none does.
  bool half_sums = false;
  // Equal parts of k whose rows are stored in an order of their own; 0: none. CUDA only.
  int64_t orders = 0;
  Epilogue epilogue;
  // The kernel before in the stream is of the same call and writes neither weights nor index, so that this
  // one may read them before its end (early_start.h).
  bool early_start = false;
  // Whether lhs with its permutation, and weights with their scales and zeros, begin at multiples of 16 bytes,
  // as most kernels read them.
  bool lhs_aligned = true, weights_aligned = true;

  int64_t lhs_columns() const { return transposed ? n : k; }
  int64_t out_columns() const { return transposed ? k : n; }
  int64_t n_blocks() const { return CeilDiv(n, kAtom); }
  // Weights that an element of the batch is multiplied by; strips of 64 channels of all of them.
  int64_t weights_per_element() const { return epilogue.gated ? 2 : 1; }
  int64_t strips() const { return weights_per_element() * n_blocks(); }
  int64_t k_blocks() const { return CeilDiv(k, kAtom); }
  int64_t groups() const { return group_size < 0 ? 1 : CeilDiv(k_blocks() * kAtom, group_size); }
  // Bytes of one scale and of one zero; 0 without zeros.
  int64_t scale_bytes() const { return SizeOf(scale); }
  int64_t zero_bytes() const {
    return zero == ZeroKind::kNone ? 0 : zero == ZeroKind::kInteger ? 1 : scale_bytes();
  }
  int64_t words_per_atom() const { return kAtom * kAtom * bits / 32; }
};

// A group size that 32 bits hold and that means the same for `k` rows: -1 where one group has them all.
inline constexpr int64_t GroupSize(int64_t size, int64_t k) {
  return size >= CeilDiv(k, kAtom) * kAtom ? -1 : size;
}

// The weight that an index stands for: negative ones count from the end, and what is still out of range is
// clamped.
JAXLOWBIT_HOST_DEVICE inline int64_t WeightNumber(int64_t index, int64_t num_weights) {
  if (index < 0) index += num_weights;
  return index < 0 ? 0 : index < num_weights ? index : num_weights - 1;
}

// Buffers of one call. `zero`, `index`, `bias` and `residual` may be null; `index` then means: weight b
// for batch b, or weight 0 when there is only one. With orders, stored row r of a part is its row
// `permutation[r]`, and `gathered` becomes lhs in the order of the stored rows, unless the product gathers it
// itself.
struct Buffers {
  const void* lhs = nullptr;             // [batch, m, lhs_columns]
  const uint32_t* packed = nullptr;      // [num_weights, n_blocks, k_blocks, words_per_atom]
  const void* scale = nullptr;           // [num_weights, n_blocks, groups, 64]
  const void* zero = nullptr;            // [num_weights, n_blocks, groups, 64]
  const int32_t* index = nullptr;        // [batch * weights_per_element] (WeightNumber)
  const void* bias = nullptr;            // [batch * weights_per_element, n]
  const void* residual = nullptr;        // as out
  const int32_t* permutation = nullptr;  // [orders, k / orders], clamped to the part
  void* gathered = nullptr;              // as lhs; uninitialised
  void* out = nullptr;                   // [batch, m, out_columns]
  void* workspace = nullptr;             // CUDA only; uninitialised
};

// One product of a call.
struct Operands {
  QuantizedMatmul problem;
  Buffers buffers;
};

}  // namespace jaxlowbit
