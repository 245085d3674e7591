// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/call.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace jaxlowbit {
namespace {

constexpr int64_t kSymbolic = -1;

ffi::Error CheckNumbers(const std::string& what, std::string_view wrong) {
  if (wrong.empty()) return ffi::Error::Success();
  return InvalidArgument(
      "the " + std::string(wrong) + " of a " + what +
      " is none that this library has; export the program again with this library.");
}

// Returns the error in a record that is independent of its buffers, or "".
std::string FieldError(const QuantizedMatmul& p) {
  const auto is = [](const char* name, int64_t value, const std::string& rule) {
    return std::string(name) + " is " + std::to_string(value) + " but must be " + rule + ".";
  };
  if (p.bits < 1 || p.bits > 8) return is("bits", p.bits, "from 1 to 8");
  if (p.group_size != -1 && (p.group_size < 16 || p.group_size % 16 != 0)) {
    return is("group_size", p.group_size, "a positive multiple of 16, or -1 for one group");
  }
  if (p.scale == ElementType::kSuper && !DividesSuperBlock(p.group_size)) {
    return is("group_size", p.group_size, "16, 32, 64 or 128 with scales of u8");
  }
  if (p.n < 1 || p.k < 1) {
    return "n is " + std::to_string(p.n) + " and k is " + std::to_string(p.k) +
           " but both must be positive.";
  }
  const bool quantized = p.lhs == ElementType::kInt8 || p.lhs == ElementType::kE4m3;
  if (!quantized && (Is8Bit(p.lhs) || p.lhs == ElementType::kInt32)) {
    return "lhs is " + TypeName(TypeOf(p.lhs)) + " but must be f32, bf16, f16, s8 or f8e4m3fn.";
  }
  if (p.scale == ElementType::kInt32) return "scale is s32 but must be a float, s8 or u8.";
  const bool sums = p.is_integer_matmul() && p.lhs == ElementType::kInt8;
  if (!sums && p.out != p.floats() && p.out != ElementType::kF32) {
    return "out is " + TypeName(TypeOf(p.out)) + " but must be f32 or " +
           TypeName(TypeOf(p.floats())) + ", or s32 with s8 lhs.";
  }
  const bool narrow = Is8Bit(p.scale) && p.scale != ElementType::kSuper;
  if (p.zero != ZeroKind::kNone && (narrow || p.codebook != Codebook::kNone)) {
    return "zero is given with 8-bit scales or a codebook, which have none.";
  }
  if (p.zero == ZeroKind::kInteger && p.scale == ElementType::kSuper) {
    return "zero is integer but with scales of two levels zeros have two levels too.";
  }
  const int64_t units = p.epilogue.units;
  if (units < 0 || (units > 1 && units != p.n && units != p.n_blocks() * kAtom)) {
    return is("units", units, "0, 1, n or n_blocks * 64");
  }
  if (p.permuted_parts < 0 || (p.permuted_parts > 0 && (p.transposed || p.k % p.permuted_parts))) {
    return is("permuted_parts", p.permuted_parts, "a divisor of k, or 0 if transposed");
  }
  if (p.epilogue.activation == Activation::kGptOss && !(p.is_ragged() && p.epilogue.gated)) {
    return "activation is gpt_oss, which only gated ragged products have.";
  }
  for (ElementType type : {p.epilogue.bias, p.epilogue.residual}) {
    if (type != p.floats() && type != ElementType::kF32) {
      return "bias or residual is " + TypeName(TypeOf(type)) + " but must be f32 or " +
             TypeName(TypeOf(p.floats())) + ".";
    }
  }
  return "";
}

// Returns the error in the sizes of a product that are not symbolic, or "".
std::string SizeError(const QuantizedMatmul& p, bool has_index) {
  if (p.is_ragged()) {
    if (p.batch != 1 || has_index || p.transposed || p.permuted_parts > 0) {
      return "a ragged product has no batch, index, permutation or transposition.";
    }
    return p.num_weights % p.weights_per_element() == 0 ? "" : "gated weights come in pairs.";
  }
  const int64_t asked = p.batch * p.weights_per_element();
  if (!has_index && p.num_weights != 1 && p.num_weights != asked) {
    return "packed holds " + std::to_string(p.num_weights) + " weights for " +
           (p.epilogue.gated ? "pairs of a batch of " : "a batch of ") + std::to_string(p.batch) +
           " but without index there must be one weight, or one for each batch element.";
  }
  if (p.batch > 0 && p.num_weights < 1) {
    return "packed holds no weight but the batch of " + std::to_string(p.batch) +
           " needs at least one.";
  }
  return "";
}

// Reads the codebook of a product from the call's `numbers`.
ffi::Error ReadCodebook(ffi::Span<const float> numbers, size_t* used, Product* product) {
  const QuantizedMatmul& p = product->problem;
  if (p.codebook == Codebook::kNone) return ffi::Error::Success();
  const size_t count = size_t{1} << p.bits;
  if (numbers.size() < *used + count) {
    return InvalidArgument("numbers has " + std::to_string(numbers.size()) +
                           " numbers but the codebooks of the products need more: one has " +
                           std::to_string(count) + ".");
  }
  product->codebook = numbers.begin() + *used;
  *used += count;
  if (CodebookOf(product->codebook, p.bits) == p.codebook) return ffi::Error::Success();
  return InvalidArgument(std::string("the codebook of a product is not ") +
                         kCodebookNames[static_cast<int>(p.codebook)] + ", as its record says.");
}

}  // namespace

ffi::Error Attributes::Check() const {
  for (auto [name, expected] :
       {std::pair{"schema", kSchema}, std::pair{"layout_version", kLayoutVersion}}) {
    const auto found = Find<int64_t>(name);
    if (found == expected) continue;
    return InvalidArgument(
        std::string("this program has ") + name + " " + (found ? std::to_string(*found) : "none") +
        " but this library reads " + std::to_string(expected) +
        "; export the program again with this library, or run it with the one that "
        "exported it.");
  }
  return Missing();
}

ffi::Error Attributes::Missing() const {
  if (missing_.empty()) return ffi::Error::Success();
  return InvalidArgument("the call has no attribute " + missing_ +
                         " of the right type; export the program again with this library.");
}

ffi::Error Attributes::Decode(std::vector<Product>* products, std::vector<Step>* steps) {
  ffi::Error error = Check();
  if (error.failure()) return error;
  using Integers = ffi::Span<const int64_t>;
  const Integers records = Find<Integers>("products").value_or(Integers());
  const auto numbers = Find<ffi::Span<const float>>("numbers");
  const auto of_steps = Get<Integers>("steps");
  if (records.size() % kProductNumbers != 0 || of_steps.size() % kStepNumbers != 0) {
    return InvalidArgument(
        "products and steps have " + std::to_string(records.size()) + " and " +
        std::to_string(of_steps.size()) + " numbers but must have multiples of " +
        std::to_string(kProductNumbers) + " and " + std::to_string(kStepNumbers) + ".");
  }
  size_t used = 0;
  products->resize(records.size() / kProductNumbers);
  for (size_t i = 0; i < products->size(); ++i) {
    Product& product = (*products)[i];
    error = CheckNumbers("product", DecodeProduct(records.begin() + i * kProductNumbers,
                                                  &product.problem, &product.places));
    if (error.failure()) return error;
    if (const std::string reason = FieldError(product.problem); !reason.empty()) {
      return InvalidArgument(reason);
    }
    error = ReadCodebook(numbers.value_or(ffi::Span<const float>()), &used, &product);
    if (error.failure()) return error;
  }
  steps->resize(of_steps.size() / kStepNumbers);
  for (size_t i = 0; i < steps->size(); ++i) {
    Step& step = (*steps)[i];
    error = CheckNumbers("step", DecodeStep(of_steps.begin() + i * kStepNumbers, &step));
    if (error.failure()) return error;
    const auto count = static_cast<int64_t>(products->size());
    if (step.kind != StepKind::kMultiply && step.kind != StepKind::kRound &&
        step.kind != StepKind::kGroup) {
      continue;
    }
    if (step.kind == StepKind::kRound && step.to != ElementType::kInt8 &&
        step.to != ElementType::kE4m3) {
      return InvalidArgument("a step rounds to " + TypeName(TypeOf(step.to)) +
                             " but it must be s8 or f8e4m3fn.");
    }
    if (step.first < 0 || step.count < 1 || step.first > count - step.count) {
      return InvalidArgument("a step has the products " + std::to_string(step.first) + " to " +
                             std::to_string(step.first + step.count - 1) + " of " +
                             std::to_string(count) + ".");
    }
  }
  return Missing();
}

ffi::Error Call::CheckPlaces() const {
  std::string wrong;
  const auto check = [&](const char* name, int64_t place) {
    if (place != 0 && !Has(place) && wrong.empty()) wrong = name;
  };
  for (const Product& product : products) VisitPlaces(product.places, check);
  for (const Step& step : steps) {
    for (int64_t place : {step.x, step.addend, step.scales, step.total, step.out, step.out_scale,
                          step.expert, step.offset, step.sizes, step.place}) {
      check("place of a step", place);
    }
  }
  for (const Product& product : products) {
    const Places& at = product.places;
    if (at.lhs == 0 || at.packed == 0 || at.scale == 0 || at.out == 0) wrong = "lhs, weight or out";
  }
  if (wrong.empty()) return ffi::Error::Success();
  return InvalidArgument("the call lacks a buffer: " + wrong + " names none of its " +
                         std::to_string(args_.size()) + " operands and " +
                         std::to_string(rets_.size()) + " results.");
}

ffi::Error Call::Decode() {
  ffi::Error error = attributes.Decode(&products, &steps);
  if (error.success()) error = CheckPlaces();
  operands.resize(products.size());
  for (size_t i = 0; error.success() && i < products.size(); ++i) {
    error = Read(&products[i], &operands[i]);
  }
  return error;
}

namespace {

// Expected buffer at a place: its type, and its shape or its number of elements.
struct Expected {
  const char* name;
  int64_t place;
  bool wanted;  // the record requires it
  ffi::DataType type;
  std::initializer_list<int64_t> shape;  // one number: the number of elements
  const char* rule;
};

bool Fits(const Expected& expected, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() != expected.type) return false;
  if (expected.shape.size() > 1) return HasShape(buffer, expected.shape);
  return static_cast<int64_t>(buffer.element_count()) == *expected.shape.begin();
}

ffi::Error BufferError(const Expected& expected, const ffi::AnyBuffer& buffer) {
  const ffi::Error error = CheckType(expected.name, buffer, expected.type);
  if (error.failure()) return error;
  if (expected.shape.size() > 1) {
    return CheckShape(expected.name, buffer, expected.shape, expected.rule);
  }
  return CheckCount(expected.name, buffer, *expected.shape.begin(), expected.rule);
}

ffi::Error PresenceError(const Expected& expected) {
  return InvalidArgument(std::string(expected.name) +
                         (expected.wanted ? " is missing" : " is given") +
                         " but the record of the product says otherwise.");
}

constexpr const char* kWeightRule = "[weights, n_blocks, k_blocks, words]";
constexpr const char* kGroupRule = "[weights, n_blocks, scale_rows, 64]";

}  // namespace

// Fills in sizes that are symbolic in the record from the buffers.
ffi::Error Call::FindSizes(const Places& at, QuantizedMatmul* p) const {
  if (p->batch != kSymbolic && p->m != kSymbolic && p->num_weights != kSymbolic) {
    return ffi::Error::Success();
  }
  const ffi::AnyBuffer lhs = At(at.lhs), packed = At(at.packed);
  ffi::Error error = CheckRank("lhs", lhs, 3, "[batch, m, columns]");
  if (error.success()) error = CheckRank("packed", packed, 4, kWeightRule);
  if (error.failure()) return error;
  if (p->batch == kSymbolic) p->batch = lhs.dimensions()[0];
  if (p->m == kSymbolic) p->m = lhs.dimensions()[1];
  if (p->num_weights == kSymbolic) p->num_weights = packed.dimensions()[0];
  return error;
}

// Checks each buffer of a product against its record and sets its address.
ffi::Error Call::Read(Product* product, Operands* found) const {
  using Type = ffi::DataType;
  const Places& at = product->places;
  QuantizedMatmul& p = product->problem;
  const ffi::Error sizes = FindSizes(at, &p);
  if (sizes.failure()) return sizes;
  if (const std::string reason = SizeError(p, at.index != 0); !reason.empty()) {
    return InvalidArgument(reason);
  }
  found->problem = p;
  Buffers& b = found->buffers;
  b.codebook = product->codebook;
  const auto read = [&](const Expected& expected, auto* address) {
    if (expected.place == 0) {
      return expected.wanted ? PresenceError(expected) : ffi::Error::Success();
    }
    if (!expected.wanted) return PresenceError(expected);
    const ffi::AnyBuffer buffer = At(expected.place);
    if (!Fits(expected, buffer)) return BufferError(expected, buffer);
    *address = static_cast<std::remove_pointer_t<decltype(address)>>(buffer.untyped_data());
    return ffi::Error::Success();
  };
  const int64_t weights = p.batch * p.weights_per_element(), rows = p.batch * p.m;
  const Type zero_type = p.zero == ZeroKind::kInteger ? Type::U8 : TypeOf(p.scale);
  const bool permuted = p.permuted_parts > 0;
  const bool scaled = (Is8Bit(p.lhs) && !p.is_integer_matmul()) || p.apply_lhs_scale;
  const std::initializer_list<int64_t> lhs = {p.batch, p.m, p.lhs_columns()};
  const std::initializer_list<int64_t> out = {p.batch, p.m, p.out_columns()};
  const std::initializer_list<int64_t> packed = {p.num_weights, p.n_blocks(), p.k_blocks(),
                                                 p.words_per_atom()};
  const std::initializer_list<int64_t> groups = {p.num_weights, p.n_blocks(), p.scale_rows(),
                                                 kAtom};
  constexpr const char* kRows = "[batch, m, columns]";
  ffi::Error error = read({"lhs", at.lhs, true, TypeOf(p.lhs), lhs, kRows}, &b.lhs);
  if (error.success()) error = read({"out", at.out, true, TypeOf(p.out), out, kRows}, &b.out);
  if (error.success()) {
    error = read({"packed", at.packed, true, Type::U32, packed, kWeightRule}, &b.packed);
  }
  if (error.success()) {
    error = read({"scale", at.scale, true, TypeOf(p.scale), groups, kGroupRule}, &b.scale);
  }
  if (error.success()) {
    error =
        read({"zero", at.zero, p.zero != ZeroKind::kNone, zero_type, groups, kGroupRule}, &b.zero);
  }
  if (error.success()) {
    error = read({"unit",
                  at.unit,
                  p.epilogue.units > 0,
                  Type::F32,
                  {p.num_weights * p.epilogue.units},
                  "weights * units"},
                 &b.unit);
  }
  if (error.success()) {
    error = read({"index",
                  at.index,
                  at.index != 0,
                  Type::S32,
                  {weights},
                  p.epilogue.gated ? "2 * batch" : "batch"},
                 &b.index);
  }
  if (error.success()) {
    error = read({"group_sizes",
                  at.group_sizes,
                  p.is_ragged(),
                  Type::S32,
                  {p.groups_of_rows},
                  "groups_of_rows"},
                 &b.group_sizes);
  }
  if (error.success()) {
    const bool given = p.is_ragged() && at.group_offset != 0;
    error = read({"group_offset", at.group_offset, given, Type::S32, {1}, "1"}, &b.group_offset);
  }
  if (error.success()) {
    error = read({"permutation", at.permutation, permuted, Type::S32, {p.k}, "k"}, &b.permutation);
  }
  if (error.success()) {
    error = read(
        {"bias", at.bias, at.bias != 0, TypeOf(p.epilogue.bias), {p.biases() * p.n}, "weights * n"},
        &b.bias);
  }
  if (error.success()) {
    error = read({"residual",
                  at.residual,
                  at.residual != 0,
                  TypeOf(p.epilogue.residual),
                  {rows * p.n},
                  "rows * n"},
                 &b.residual);
  }
  if (error.success()) {
    error = read({"lhs_scale", at.lhs_scale, scaled, Type::F32, {rows}, "batch * m"}, &b.lhs_scale);
  }
  if (error.success()) {
    error = read({"gathered", at.gathered, permuted, TypeOf(p.lhs), lhs, kRows}, &b.gathered);
  }
  return error;
}

}  // namespace jaxlowbit
