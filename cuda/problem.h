// SPDX-License-Identifier: Apache-2.0
//
// The problem as a value: everything that the choice and the launch of a kernel depend on. This header includes no
// XLA, no Python and no CUDA, so the CPU kernel, the handlers, the driver and the tests share it.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace jaxlowbit {

// Epilogue: units, bias, activation, gate and residual, applied in float32 before the result is rounded to the type of
// out: activation(unit * product + bias) + residual, or, gated, activation(unit * gate + bias) * (unit * up + bias) +
// residual.
struct Epilogue {
  Activation activation = Activation::kNone;
  // Weights come in pairs: batch element b multiplies the weights 2 b (gate) and 2 b + 1 (up), or the two that
  // index lists there.
  bool gated = false;
  // Floats that Buffers::unit has for each weight: none, one, or one for each channel and perhaps more behind them.
  int64_t units = 0;
  // Types of Buffers::bias and Buffers::residual if present: QuantizedMatmul::floats(), or float32.
  ElementType bias = ElementType::kF32, residual = ElementType::kF32;
};

// out[b] = lhs[b] @ weight[index[b]] for b < batch, with lhs (m, k) and a packed (k, n) weight; or,
// transposed, out[b] = lhs[b] @ weight[index[b]]^T, with lhs (m, n).
struct QuantizedMatmul {
  int64_t batch = 1;
  int64_t num_weights = 1;  // weights that `packed` holds
  int64_t m = 0, n = 0, k = 0;
  int bits = 4;
  Codebook codebook = Codebook::kNone;
  int64_t group_size = -1;  // along k; -1: one group
  ElementType lhs = ElementType::kBf16;
  ElementType scale = ElementType::kBf16;
  // kInt32: sums of integers, of an int8 lhs, which no float scale multiplies.
  ElementType out = ElementType::kBf16;
  ZeroKind zero = ZeroKind::kNone;
  bool transposed = false;
  // Scales multiply accumulators instead of weights: exact integers are multiplied, and the partial sum of each
  // group is scaled in float32. Serves float32 activations, which arrive as bf16 summands.
  bool scale_sums = false;
  // Results are multiplied by Buffers::lhs_scale, and have no epilogue: lhs are quantized values of 16 bits. (Those of an
  // lhs of 8 bits always are, before the epilogue.)
  bool scales_rows = false;
  // A kernel may accumulate products of float16 in float16, over as much of k as its page says. No kernel has to,
  // and other types of lhs are not affected.
  bool half_sums = false;
  // Equal parts of k whose rows are stored in a permuted order; 0: k is in order. CUDA only.
  int64_t permuted_parts = 0;
  Epilogue epilogue;
  // Programmatic dependent launch: the previous kernel in the stream belongs to the same call and writes neither
  // weights nor index, so this one may start and read them before that one has ended (kernels/launch_config.h).
  bool pdl = false;
  // Whether lhs and its permutation, and weights with their scales and zeros, begin at multiples of 16 bytes.
  bool lhs_aligned = true, weights_aligned = true;
  // With scales_rows: lhs are floats, bfloat16, and the kernel rounds them and finds the scales itself.
  Rounding rounding = Rounding::kNone;

  // The type of scales, results, biases and residuals that are not float32: that of lhs, or, of an lhs of 8 bits, bf16.
  JAXLOWBIT_HOST_DEVICE constexpr ElementType floats() const {
    return Is8Bit(lhs) ? ElementType::kBf16 : lhs;
  }
  JAXLOWBIT_HOST_DEVICE constexpr bool sums_integers() const { return out == ElementType::kInt32; }
  // Whether sums may be in float16. Weights times scales of 8 bits may be too large for that before the second scale,
  // outside of the product, multiplies the sums.
  constexpr bool may_sum_halves() const {
    return half_sums && lhs == ElementType::kF16 && !Is8Bit(scale);
  }
  constexpr int64_t lhs_columns() const { return transposed ? n : k; }
  constexpr int64_t out_columns() const { return transposed ? k : n; }
  constexpr int64_t n_blocks() const { return CeilDiv(n, kAtom); }
  // Weights that one batch element multiplies, and strips (64 output channels) of all of them.
  constexpr int64_t weights_per_element() const { return epilogue.gated ? 2 : 1; }
  constexpr int64_t strips() const { return weights_per_element() * n_blocks(); }
  constexpr int64_t k_blocks() const { return CeilDiv(k, kAtom); }
  constexpr int64_t groups() const {
    return group_size < 0 ? 1 : CeilDiv(k_blocks() * kAtom, group_size);
  }
  // Rows of 64 scales of a strip: one for each group; in scales of two levels, whole super-blocks.
  constexpr int64_t scale_rows() const {
    if (scale != ElementType::kSuper) return groups();
    return CeilDiv(k_blocks() * kAtom, kSuperBlock) * (kSuperBlock / group_size + kFloatRows);
  }
  // Bytes of one scale and of one zero; 0 without zeros.
  constexpr int64_t scale_bytes() const { return SizeOf(scale); }
  constexpr int64_t zero_bytes() const {
    return zero == ZeroKind::kNone ? 0 : zero == ZeroKind::kInteger ? 1 : scale_bytes();
  }
  constexpr int64_t words_per_atom() const { return kAtom * kAtom * bits / 32; }
};

// Whether super-blocks are whole groups of this size, and several of them.
constexpr bool DividesSuperBlock(int64_t group_size) {
  return group_size > 0 && group_size < kSuperBlock && kSuperBlock % group_size == 0;
}

// A group size that 32 bits hold and that means the same for `k` rows: -1 if one group has them all, except in
// super-blocks, which are whole ones for any k.
constexpr int64_t GroupSize(int64_t size, int64_t k, ElementType scale) {
  if (scale == ElementType::kSuper) return size;
  return size >= CeilDiv(k, kAtom) * kAtom ? -1 : size;
}

// Buffers of one call. `zero`, `unit`, `index`, `bias` and `residual` may be null. A null index is weight b for batch
// element b, or weight 0 if there is only one. With permuted parts, stored row r of a part is its row
// `permutation[r]`, clamped to the part; a kernel that does not gather lhs itself reads `gathered`, lhs in the order of
// the stored rows.
//
// An lhs of 8 bits has a scale for each row, a token, which multiplies results before the epilogue; sums of integers
// take no scales but those that are integers. Its columns are
// interleaved as the instruction takes them beside packed weights: of each 16, column 8 v + r is stored at 2 r + v.
// Beside it, scales that are integers make weights of 8 bits.
struct Buffers {
  const void* lhs = nullptr;             // [batch, m, lhs_columns]
  const float* lhs_scale = nullptr;      // [batch, m], of quantized values
  const uint32_t* packed = nullptr;      // [num_weights, n_blocks, k_blocks, words_per_atom]
  const void* scale = nullptr;           // [num_weights, n_blocks, scale_rows, 64]
  const void* zero = nullptr;            // [num_weights, n_blocks, scale_rows, 64]
  const float* unit = nullptr;           // [num_weights, epilogue.units]; null: 1
  const int32_t* index = nullptr;        // [batch * weights_per_element] (WeightNumber)
  const void* bias = nullptr;            // [batch * weights_per_element, n]
  const void* residual = nullptr;        // as out
  const int32_t* permutation = nullptr;  // [permuted_parts, k / permuted_parts]
  const float* codebook = nullptr;       // [2^bits] in memory of the host; null: integers
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
