// SPDX-License-Identifier: Apache-2.0
//
// The operands of the target jaxlowbit_quantized_matmul, the same on every platform:
//
//   0 lhs     T[b, m, k], transposed [b, m, n]  T: f32, bf16 or f16
//   1 packed  u32[L, n_blocks, k_blocks, words]
//   2 scale   S[L, n_blocks, groups, 64]        S: f32, bf16, f16, f8e8m0fnu, f8e4m3fn or s8; or, of two levels,
//             u8[L, n_blocks, scale_rows, 64] (docs/layout.md)
//   3 zero    u8[L, n_blocks, groups, 64] integer, S[...] float, or u8[0]: none; beside scales of two levels as these;
//             beside f8e4m3fn and s8 scales, whose weights have no zeros, f32[L] or f32[L, n]: the units of the weights
//             or of their channels (Buffers::unit in cuda/problem.h), or u8[0]: 1
//   4 index   s32[b]: batch element i multiplies weight index[i] (schedule/weight_number.h); s32[0]: weight
//             i, or the only one; gated, s32[2 b]: pairs of weights, the gate first
//   result 0  out O[b, m, n], transposed [b, m, k]  O: T or f32
//
// On CUDA the target has more operands (cuda_handler.cc), and so have calls with an epilogue (cuda_fused.cc). Calls of
// several products (cuda_calls.cc) have these for each product.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/codebook.h"
#include "cuda/extents.h"
#include "cuda/problem.h"
#include "xla_ffi/attributes.h"

namespace jaxlowbit {

inline Extent ExtentOf(ffi::AnyBuffer buffer) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
}

// A weight, or a stack and the positions in it.
struct WeightBuffers {
  ffi::AnyBuffer packed, scale, zero, index;
};

// What the attributes of a call say of one product.
struct ProductAttributes {
  int64_t bits, group_size;
  bool transposed = false, scale_sums = false, half_sums = false;
  bool gated = false;
  bool quantized_lhs = false;            // lhs has 8 bits
  ffi::Span<const float> codebook = {};  // empty: integers

  // Reads the format of the one weight of a call, or of all its weights.
  static ProductAttributes OfFormat(Attributes* attributes) {
    ProductAttributes product = {attributes->Get<int64_t>("bits"),
                                 attributes->Get<int64_t>("group_size")};
    product.codebook = attributes->OfCodebooks<float>("codebook");
    return product;
  }

  // Reads the attributes of the target jaxlowbit_quantized_matmul.
  static ProductAttributes Of(Attributes* attributes) {
    ProductAttributes product = OfFormat(attributes);
    product.transposed = attributes->Get<bool>("transposed");
    product.scale_sums = attributes->Get<bool>("scale_sums");
    product.half_sums = attributes->Get<bool>("half_sums");
    return product;
  }
};

// The codebooks of a call whose weights may have different ones: the numbers of all, one after the other, and how many
// each weight has, 0 for integers. Neither is there if no weight has a codebook.
struct Codebooks {
  ffi::Span<const float> numbers;
  ffi::Span<const int64_t> sizes;

  static Codebooks Of(Attributes* attributes) {
    return {attributes->OfCodebooks<float>("codebook"),
            attributes->OfCodebooks<int64_t>("codebook_sizes")};
  }

  ffi::Error Check(size_t weights) const {
    if (sizes.size() != 0 && sizes.size() != weights) {
      return Refuse("codebook_sizes has " + std::to_string(sizes.size()) +
                    " sizes but must have one for each of " + std::to_string(weights) +
                    " weights.");
    }
    size_t left = numbers.size();
    for (int64_t size : sizes) {
      if (size < 0 || static_cast<size_t>(size) > left) {
        return Refuse("codebook has " + std::to_string(numbers.size()) +
                      " numbers but must have as many as codebook_sizes adds up to.");
      }
      left -= size;
    }
    return ffi::Error::Success();
  }

  // The numbers of weight i, after Check; none for integers.
  ffi::Span<const float> Own(size_t i) const {
    if (sizes.size() == 0) return {};
    const size_t before = std::accumulate(sizes.begin(), sizes.begin() + i, size_t{0});
    return {numbers.begin() + before, static_cast<size_t>(sizes[i])};
  }
};

inline std::optional<ElementType> FloatType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return ElementType::kF32;
    case ffi::DataType::BF16:
      return ElementType::kBf16;
    case ffi::DataType::F16:
      return ElementType::kF16;
    default:
      return std::nullopt;
  }
}

inline std::optional<ElementType> ScaleType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F8E8M0FNU:
      return ElementType::kE8m0;
    case ffi::DataType::F8E4M3FN:
      return ElementType::kE4m3;
    case ffi::DataType::S8:
      return ElementType::kInt8;
    case ffi::DataType::U8:
      return ElementType::kSuper;
    default:
      return FloatType(type);
  }
}

inline std::optional<ElementType> QuantizedType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::S8:
      return ElementType::kInt8;
    case ffi::DataType::F8E4M3FN:
      return ElementType::kE4m3;
    default:
      return std::nullopt;
  }
}

inline ffi::Error DecodeActivation(std::string_view name, Activation* activation) {
  const auto found = std::find(std::begin(kActivationNames), std::end(kActivationNames), name);
  if (found == std::end(kActivationNames)) {
    return Refuse("activation is unknown: " + std::string(name) + ".");
  }
  *activation = static_cast<Activation>(found - std::begin(kActivationNames));
  return ffi::Error::Success();
}

inline std::string TypeName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return "f32";
    case ffi::DataType::BF16:
      return "bf16";
    case ffi::DataType::F16:
      return "f16";
    case ffi::DataType::F8E8M0FNU:
      return "f8e8m0fnu";
    case ffi::DataType::F8E4M3FN:
      return "f8e4m3fn";
    case ffi::DataType::S8:
      return "s8";
    case ffi::DataType::U8:
      return "u8";
    case ffi::DataType::U32:
      return "u32";
    case ffi::DataType::S32:
      return "s32";
    default:
      return "XLA type " + std::to_string(static_cast<int>(type));
  }
}

template <typename Dimensions>
std::string ShapeName(const Dimensions& dimensions) {
  std::string text = "[";
  for (int64_t size : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline bool HasShape(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> expected) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end());
}

// Handlers run before every execution and in it, so text is put together only for a refusal.
inline ffi::Error CheckShape(std::string_view name, const ffi::AnyBuffer& buffer,
                             std::initializer_list<int64_t> expected, std::string_view rule) {
  if (HasShape(buffer, expected)) return ffi::Error::Success();
  return Refuse(std::string(name) + " has shape " + ShapeName(buffer.dimensions()) +
                " but must be " + std::string(rule) + " = " + ShapeName(expected) + ".");
}

inline ffi::Error CheckRank(std::string_view name, const ffi::AnyBuffer& buffer, size_t rank,
                            std::string_view rule) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return Refuse(std::string(name) + " has shape " + ShapeName(buffer.dimensions()) +
                " but must be " + std::string(rule) + ".");
}

inline ffi::Error CheckType(std::string_view name, const ffi::AnyBuffer& buffer, bool valid,
                            std::string_view rule) {
  if (valid) return ffi::Error::Success();
  return Refuse(std::string(name) + " is " + TypeName(buffer.element_type()) + " but must be " +
                std::string(rule) + ".");
}

inline ffi::Error CheckFormat(const ProductAttributes& attributes) {
  const auto [bits, group_size] = std::pair(attributes.bits, attributes.group_size);
  if (bits < 1 || bits > 8) {
    return Refuse("bits is " + std::to_string(bits) + " but must be from 1 to 8.");
  }
  if (group_size != -1 && (group_size < 16 || group_size % 16 != 0)) {
    return Refuse("group_size is " + std::to_string(group_size) +
                  " but must be a positive multiple of 16, or -1 for one group.");
  }
  const size_t numbers = attributes.codebook.size();
  if (numbers != 0 && numbers != size_t{1} << bits) {
    return Refuse("codebook has " + std::to_string(numbers) + " numbers but must have " +
                  std::to_string(1 << bits) + ", one for each value of " + std::to_string(bits) +
                  " bits.");
  }
  return ffi::Error::Success();
}

// What the CPU's handlers say of scales of two levels.
inline constexpr std::string_view kNoSuperBlocks =
    "scale is u8 but the CPU kernels read no scales of two levels; expand them to f32.";

// Decodes units, which stand in the place of zeros beside 8-bit scales.
inline ffi::Error DecodeUnits(ffi::AnyBuffer units, const ProductAttributes& attributes,
                              Operands* operands) {
  QuantizedMatmul& p = operands->problem;
  if (p.scale == ElementType::kE8m0 || attributes.transposed || attributes.quantized_lhs) {
    return Refuse("zero is given beside 8-bit scales that have neither zeros nor, " +
                  std::string(attributes.transposed      ? "transposed"
                              : attributes.quantized_lhs ? "beside quantized activations"
                                                         : "as powers of two") +
                  ", units; it must be empty.");
  }
  constexpr std::string_view kName = "zero beside 8-bit scales";
  ffi::Error error = CheckType(kName, units, units.element_type() == ffi::DataType::F32, "f32");
  const bool of_channels = units.dimensions().size() > 1;
  if (error.success() && of_channels) {
    error = CheckShape(kName, units, {p.num_weights, p.n}, "[0], [weights] or [weights, n]");
  } else if (error.success()) {
    error = CheckShape(kName, units, {p.num_weights}, "[0], [weights] or [weights, n]");
  }
  if (error.failure()) return error;
  p.epilogue.units = of_channels ? p.n : 1;
  operands->buffers.unit = static_cast<const float*>(units.untyped_data());
  return error;
}

// Fills `operands`, or says which operand breaks which rule.
inline ffi::Error DecodeOperands(ffi::AnyBuffer lhs, const WeightBuffers& weight,
                                 ffi::AnyBuffer out, const ProductAttributes& attributes,
                                 Operands* operands) {
  using Type = ffi::DataType;
  const auto& [packed, scale, zero, index] = weight;
  const auto lhs_type =
      attributes.quantized_lhs ? QuantizedType(lhs.element_type()) : FloatType(lhs.element_type());
  const auto scale_type = ScaleType(scale.element_type());
  const bool sums_integers =
      attributes.quantized_lhs && lhs_type == ElementType::kInt8 && out.element_type() == Type::S32;
  const auto out_type = sums_integers ? ElementType::kInt32 : FloatType(out.element_type());
  constexpr std::string_view kWeightRule = "[weights, n_blocks, k_blocks, words]";
  const bool super_blocks = scale_type == ElementType::kSuper;
  const std::string_view group_rule =
      super_blocks ? "[weights, n_blocks, scale_rows, 64]" : "[weights, n_blocks, groups, 64]";
  const auto floats = attributes.quantized_lhs ? ElementType::kBf16 : lhs_type;
  const bool takes_out =
      out_type && (sums_integers || out_type == floats || out_type == ElementType::kF32);
  for (const ffi::Error& error :
       {CheckFormat(attributes),
        CheckType("lhs", lhs, lhs_type.has_value(),
                  attributes.quantized_lhs ? "s8 or f8e4m3fn" : "f32, bf16 or f16"),
        CheckType("packed", packed, packed.element_type() == Type::U32, "u32"),
        CheckType("scale", scale, scale_type.has_value(),
                  "f32, bf16, f16, f8e8m0fnu, f8e4m3fn, s8 or u8"),
        CheckType("index", index, index.element_type() == Type::S32, "s32"),
        takes_out ? ffi::Error::Success()
                  : CheckType("out", out, false,
                              attributes.quantized_lhs
                                  ? "f32 or bf16, or s32 beside s8 lhs"
                                  : "f32 or the type of lhs, " + TypeName(lhs.element_type())),
        CheckRank("lhs", lhs, 3, "[batch, m, k]"), CheckRank("out", out, 3, "[batch, m, n]"),
        CheckRank("packed", packed, 4, kWeightRule)}) {
    if (error.failure()) return error;
  }

  QuantizedMatmul& p = operands->problem;
  p.batch = lhs.dimensions()[0];
  p.m = lhs.dimensions()[1];
  p.transposed = attributes.transposed;
  p.scale_sums = attributes.scale_sums;
  p.half_sums = attributes.half_sums;
  p.epilogue.gated = attributes.gated;
  (p.transposed ? p.n : p.k) = lhs.dimensions()[2];
  (p.transposed ? p.k : p.n) = out.dimensions()[2];
  p.num_weights = packed.dimensions()[0];
  p.bits = static_cast<int>(attributes.bits);
  p.group_size = GroupSize(attributes.group_size, p.k, *scale_type);
  p.lhs = *lhs_type;
  p.scale = *scale_type;
  p.out = *out_type;
  if (super_blocks && !DividesSuperBlock(p.group_size)) {
    return Refuse("group_size is " + std::to_string(p.group_size) +
                  " but beside scales of u8 it must be 16, 32, 64 or 128.");
  }
  if (p.n < 1 || p.k < 1) {
    return Refuse("n is " + std::to_string(p.n) + " and k is " + std::to_string(p.k) +
                  " but both must be positive.");
  }
  for (const ffi::Error& error :
       {CheckShape("lhs", lhs, {p.batch, p.m, p.lhs_columns()}, "[batch, m, k]"),
        CheckShape("out", out, {p.batch, p.m, p.out_columns()}, "[batch, m, columns]"),
        CheckShape("packed", packed,
                   {p.num_weights, p.n_blocks(), p.k_blocks(), p.words_per_atom()}, kWeightRule),
        CheckShape("scale", scale, {p.num_weights, p.n_blocks(), p.scale_rows(), kAtom},
                   group_rule)}) {
    if (error.failure()) return error;
  }

  if (HasShape(zero, {0})) {
    p.zero = ZeroKind::kNone;
  } else if (Is8Bit(p.scale) && !super_blocks) {
    const ffi::Error error = DecodeUnits(zero, attributes, operands);
    if (error.failure()) return error;
  } else {
    const bool integers = zero.element_type() == Type::U8 && !super_blocks;
    p.zero = integers ? ZeroKind::kInteger : ZeroKind::kFloat;
    if (p.zero == ZeroKind::kFloat && zero.element_type() != scale.element_type()) {
      return CheckType("zero", zero, false,
                       "u8 or the type of scale, " + TypeName(scale.element_type()));
    }
    const ffi::Error shape_error =
        CheckShape("zero", zero, {p.num_weights, p.n_blocks(), p.scale_rows(), kAtom},
                   "[0] or " + std::string(group_rule));
    if (shape_error.failure()) return shape_error;
    if (attributes.codebook.size() > 0) {
      return Refuse("zero is given beside a codebook, which has none; it must be empty.");
    }
  }

  const bool has_index = !HasShape(index, {0});
  const int64_t asked = p.batch * p.weights_per_element();
  if (has_index) {
    const ffi::Error error = CheckShape("index", index, {asked},
                                        p.epilogue.gated ? "[0] or [2 * batch]" : "[0] or [batch]");
    if (error.failure()) return error;
  } else if (p.num_weights != 1 && p.num_weights != asked) {
    return Refuse("packed holds " + std::to_string(p.num_weights) + " weights for " +
                  (p.epilogue.gated ? "pairs of a batch of " : "a batch of ") +
                  std::to_string(p.batch) +
                  " but without index there must be one weight, or one for each batch element.");
  }
  if (p.batch > 0 && p.num_weights < 1) {
    return Refuse("packed holds no weight but the batch of " + std::to_string(p.batch) +
                  " needs at least one.");
  }

  Buffers& b = operands->buffers;
  b.lhs = lhs.untyped_data();
  b.packed = static_cast<const uint32_t*>(packed.untyped_data());
  b.scale = scale.untyped_data();
  b.zero = p.zero == ZeroKind::kNone ? nullptr : zero.untyped_data();
  b.index = has_index ? static_cast<const int32_t*>(index.untyped_data()) : nullptr;
  b.out = out.untyped_data();
  if (attributes.codebook.size() > 0) b.codebook = attributes.codebook.begin();
  p.codebook = CodebookOf(b.codebook, p.bits);
  return ffi::Error::Success();
}

}  // namespace jaxlowbit
