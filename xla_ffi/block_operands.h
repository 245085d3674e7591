// SPDX-License-Identifier: Apache-2.0
//
// The operands of the target jaxlowbit_quantized_block, the same on every platform: what lies between two attentions
// of a transformer.
//
//   sum       = residual + attended @ out
//   hidden    = activation(gate) * up of rms_norm(sum) * norm
//   result    = sum + hidden @ down
//   following = rms_norm(result) * following_norm @ each of the following weights
#pragma once

#include <string>
#include <vector>

#include "cuda/limits.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {

// Operands of a weight: packed, scale, zero, index; where activations are rounded to 8 bits, channel_scale too.
// Weights: out, gate_up, down, then the following.
inline constexpr size_t kPerWeight = 4, kPerByteWeight = 5, kWeights = 3;

// Operands and results of a call from one of them on.
struct Tail {
  ffi::RemainingArgs args;
  size_t first_arg;
  ffi::RemainingRets rets;
  size_t first_ret;
  size_t per_weight = kPerWeight;

  size_t operands() const { return args.size() - first_arg; }
  size_t following() const { return rets.size() - first_ret; }
  // Operand j of weight i.
  ffi::AnyBuffer weight(size_t i, size_t j) const {
    return args.get<ffi::AnyBuffer>(first_arg + per_weight * i + j).value();
  }
  ffi::AnyBuffer product(size_t i) const {
    return *rets.get<ffi::AnyBuffer>(first_ret + i).value();
  }
};

struct BlockBuffers {
  ffi::AnyBuffer attended, residual, norm, following_norm;
  ffi::AnyBuffer result, projected, sum, normed, hidden;
  // What is multiplied by out and by down: attended and hidden, or their values of 8 bits, which normed then has too.
  ffi::AnyBuffer lhs_of_out = attended, lhs_of_down = hidden;
};

// The products, in order: out, up, down, then the following.
inline ffi::Error DecodeProducts(const BlockBuffers& buffers, const Tail& tail,
                                 ffi::Span<const int64_t> bits, ffi::Span<const int64_t> group_size,
                                 const Codebooks& codebooks, std::vector<Operands>* products) {
  const size_t count = kWeights + tail.following();
  if (tail.operands() != tail.per_weight * count || bits.size() != count ||
      group_size.size() != count) {
    return Refuse("a block with " + std::to_string(tail.following()) + " following products has " +
                  std::to_string(count) + " weights of " + std::to_string(tail.per_weight) +
                  " operands, but " + std::to_string(tail.operands()) + " operands, " +
                  std::to_string(bits.size()) + " bits and " + std::to_string(group_size.size()) +
                  " group sizes came.");
  }
  const ffi::Error codebooks_error = codebooks.Check(count);
  if (codebooks_error.failure()) return codebooks_error;
  products->resize(count);
  for (size_t i = 0; i < count; ++i) {
    const auto operand = [&](size_t j) { return tail.weight(i, j); };
    ProductAttributes attributes = {bits[i], group_size[i]};
    attributes.gated = i == 1;
    attributes.quantized_lhs = tail.per_weight == kPerByteWeight;
    attributes.codebook = codebooks.Own(i);
    const bool reads_normed = i == 1 || i >= kWeights;
    const ffi::AnyBuffer lhs = reads_normed ? buffers.normed
                               : i == 0     ? buffers.lhs_of_out
                                            : buffers.lhs_of_down;
    const ffi::AnyBuffer written = i == 1         ? buffers.hidden
                                   : i < kWeights ? buffers.projected
                                                  : tail.product(i - kWeights);
    const ffi::Error error = DecodeOperands(lhs, {operand(0), operand(1), operand(2), operand(3)},
                                            written, attributes, &(*products)[i]);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

// `p`: the first product. `parts`: of several devices, what is projected are float32 parts of a sum.
inline ffi::Error CheckRows(const BlockBuffers& buffers, bool follows, const QuantizedMatmul& p,
                            bool parts = false) {
  const auto has_type = [&](const std::string& name, ffi::AnyBuffer buffer) {
    return CheckType(name, buffer, FloatType(buffer.element_type()) == p.floats(),
                     "the type of attended");
  };
  const auto has_shape = [&](const std::string& name, ffi::AnyBuffer rows) {
    return CheckShape(name, rows, {1, p.m, p.n}, "[1, m, n]");
  };
  const auto is_rows = [&](const std::string& name, ffi::AnyBuffer rows) {
    const ffi::Error error = has_shape(name, rows);
    return error.failure() ? error : has_type(name, rows);
  };
  const auto is_projected = [&](const std::string& name, ffi::AnyBuffer rows) {
    const ffi::Error error = has_shape(name, rows);
    if (error.failure() || !parts) return error.failure() ? error : has_type(name, rows);
    return CheckType(name, rows, rows.element_type() == ffi::DataType::F32, "f32");
  };
  const auto is_scales = [&](const std::string& name, ffi::AnyBuffer scales) {
    const ffi::Error error = CheckShape(name, scales, {p.n}, "[n]");
    if (error.failure() || FloatType(scales.element_type()) == ElementType::kF32) return error;
    return CheckType(name, scales, FloatType(scales.element_type()) == p.floats(),
                     "f32 or the type of attended");
  };
  if (p.n % 8 != 0 || p.n > kMaxRmsNormColumns) {
    return Refuse("rows are normalized that have " + std::to_string(p.n) +
                  " elements, but it must be a multiple of 8 up to " +
                  std::to_string(kMaxRmsNormColumns) + ".");
  }
  const auto hidden = buffers.hidden.dimensions();
  for (const ffi::Error& error :
       {CheckShape("attended", buffers.attended, {1, p.m, p.k}, "[1, m, k]"),
        has_type("attended", buffers.attended),
        CheckShape("lhs of down", buffers.lhs_of_down, {1, p.m, hidden[2]}, "the shape of hidden"),
        is_rows("residual", buffers.residual), is_projected("projected", buffers.projected),
        is_rows("sum", buffers.sum), has_shape("normed", buffers.normed),
        Is8Bit(p.lhs) ? ffi::Error::Success() : has_type("normed", buffers.normed),
        is_rows("result", buffers.result), is_scales("norm", buffers.norm),
        has_type("hidden", buffers.hidden),
        follows ? is_scales("following_norm", buffers.following_norm) : ffi::Error::Success()}) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace jaxlowbit
