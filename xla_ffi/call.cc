// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/call.h"

#include <algorithm>
#include <initializer_list>
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
  if (HasTwoLevels(p.scale) && !DividesSuperBlock(p.group_size)) {
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
  const bool narrow = Is8Bit(p.scale) && !HasTwoLevels(p.scale);
  if (p.zero != ZeroKind::kNone && (narrow || p.codebook != Codebook::kNone)) {
    return "zero is given with 8-bit scales or a codebook, which have none.";
  }
  if (p.zero == ZeroKind::kInteger && HasTwoLevels(p.scale)) {
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

constexpr const char* kRowsRule = "[batch, m, columns]";
constexpr const char* kWeightRule = "[weights, n_blocks, k_blocks, words]";
constexpr const char* kGroupRule = "[weights, n_blocks, scale_rows, 64]";

// Checks the buffers of a product against its record, and sets their addresses, until the first error.
class BufferReader {
 public:
  BufferReader(const Call& call, const Product& product, Operands* found)
      : call_(call), at_(product.places), p_(found->problem), b_(found->buffers) {}

  ffi::Error Read() {
    ReadMatrices();
    ReadSelection();
    ReadEpilogue();
    return error_;
  }

 private:
  using Type = ffi::DataType;

  void ReadMatrices() {
    const std::initializer_list<int64_t> groups = {p_.num_weights, p_.n_blocks(), p_.scale_rows(),
                                                   kAtom};
    const bool has_zero = p_.zero != ZeroKind::kNone;
    const Type zero = p_.zero == ZeroKind::kInteger ? Type::U8 : TypeOf(p_.scale);
    Shaped("lhs", at_.lhs, true, TypeOf(p_.lhs), {p_.batch, p_.m, p_.lhs_columns()}, kRowsRule,
           &b_.lhs);
    Shaped("out", at_.out, true, TypeOf(p_.out), {p_.batch, p_.m, p_.out_columns()}, kRowsRule,
           &b_.out);
    Shaped("packed", at_.packed, true, Type::U32,
           {p_.num_weights, p_.n_blocks(), p_.k_blocks(), p_.words_per_atom()}, kWeightRule,
           &b_.packed);
    Shaped("scale", at_.scale, true, TypeOf(p_.scale), groups, kGroupRule, &b_.scale);
    Shaped("zero", at_.zero, has_zero, zero, groups, kGroupRule, &b_.zero);
    const int64_t units = p_.epilogue.units;
    Counted("unit", at_.unit, units > 0, Type::F32, p_.num_weights * units, "weights * units",
            &b_.unit);
  }

  // Reads the buffers that select weights and rows.
  void ReadSelection() {
    Counted("index", at_.index, at_.index != 0, Type::S32, p_.batch * p_.weights_per_element(),
            p_.epilogue.gated ? "2 * batch" : "batch", &b_.index);
    const bool has_offset = p_.is_ragged() && at_.group_offset != 0;
    Counted("group_sizes", at_.group_sizes, p_.is_ragged(), Type::S32, p_.groups_of_rows,
            "groups_of_rows", &b_.group_sizes);
    Counted("group_offset", at_.group_offset, has_offset, Type::S32, 1, "1", &b_.group_offset);
    const bool permuted = p_.permuted_parts > 0;
    Counted("permutation", at_.permutation, permuted, Type::S32, p_.k, "k", &b_.permutation);
    Shaped("gathered", at_.gathered, permuted, TypeOf(p_.lhs), {p_.batch, p_.m, p_.lhs_columns()},
           kRowsRule, &b_.gathered);
  }

  void ReadEpilogue() {
    const int64_t rows = p_.batch * p_.m;
    const bool scaled = (Is8Bit(p_.lhs) && !p_.is_integer_matmul()) || p_.apply_lhs_scale;
    Counted("bias", at_.bias, at_.bias != 0, TypeOf(p_.epilogue.bias), p_.biases() * p_.n,
            "weights * n", &b_.bias);
    Counted("residual", at_.residual, at_.residual != 0, TypeOf(p_.epilogue.residual), rows * p_.n,
            "rows * n", &b_.residual);
    Counted("lhs_scale", at_.lhs_scale, scaled, Type::F32, rows, "batch * m", &b_.lhs_scale);
  }

  // Reads a buffer of this type and shape. `wanted`: the record requires it.
  template <typename T>
  void Shaped(const char* name, int64_t place, bool wanted, Type type,
              std::initializer_list<int64_t> shape, const char* rule, T** address) {
    if (!Find(name, place, wanted, type)) return;
    error_ = CheckShape(name, call_.At(place), shape, rule);
    *address = static_cast<T*>(call_.DataAt(place));
  }

  // Reads a buffer of this type and number of elements.
  template <typename T>
  void Counted(const char* name, int64_t place, bool wanted, Type type, int64_t count,
               const char* rule, T** address) {
    if (!Find(name, place, wanted, type)) return;
    error_ = CheckCount(name, call_.At(place), count, rule);
    *address = static_cast<T*>(call_.DataAt(place));
  }

  // Returns false if there is no buffer to read. Checks its presence and type.
  bool Find(const char* name, int64_t place, bool wanted, Type type) {
    if (error_.failure()) return false;
    if (wanted != (place != 0)) {
      error_ = InvalidArgument(std::string(name) + (wanted ? " is missing" : " is given") +
                               " but the record of the product says otherwise.");
    } else if (wanted) {
      error_ = CheckType(name, call_.At(place), type);
    }
    return wanted && error_.success();
  }

  const Call& call_;
  const Places& at_;
  const QuantizedMatmul& p_;
  Buffers& b_;
  ffi::Error error_ = ffi::Error::Success();
};

}  // namespace

// Fills in sizes that are symbolic in the record from the buffers.
ffi::Error Call::FindSizes(const Places& at, QuantizedMatmul* p) const {
  if (p->batch != kSymbolic && p->m != kSymbolic && p->num_weights != kSymbolic) {
    return ffi::Error::Success();
  }
  const ffi::AnyBuffer lhs = At(at.lhs), packed = At(at.packed);
  ffi::Error error = CheckRank("lhs", lhs, 3, kRowsRule);
  if (error.success()) error = CheckRank("packed", packed, 4, kWeightRule);
  if (error.failure()) return error;
  if (p->batch == kSymbolic) p->batch = lhs.dimensions()[0];
  if (p->m == kSymbolic) p->m = lhs.dimensions()[1];
  if (p->num_weights == kSymbolic) p->num_weights = packed.dimensions()[0];
  return error;
}

// Checks each buffer of a product against its record and sets its address.
ffi::Error Call::Read(Product* product, Operands* found) const {
  QuantizedMatmul& p = product->problem;
  const ffi::Error sizes = FindSizes(product->places, &p);
  if (sizes.failure()) return sizes;
  if (const std::string reason = SizeError(p, product->places.index != 0); !reason.empty()) {
    return InvalidArgument(reason);
  }
  found->problem = p;
  found->buffers.codebook = product->codebook;
  return BufferReader(*this, *product, found).Read();
}

std::vector<int64_t> PlacesRead(const Call& call, const Step& step) {
  std::vector<int64_t> places;
  switch (step.kind) {
    case StepKind::kMultiply:
      for (int64_t i = step.first; i < step.first + step.count; ++i) {
        const Places& at = call.products[i].places;
        for (int64_t place :
             {at.lhs, at.packed, at.scale, at.zero, at.unit, at.index, at.group_sizes,
              at.group_offset, at.permutation, at.bias, at.residual, at.lhs_scale}) {
          if (place != 0) places.push_back(place);
        }
      }
      break;
    case StepKind::kRound:
    case StepKind::kNormalize:
    case StepKind::kRoute:
      for (int64_t place : {step.x, step.addend, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      break;
    case StepKind::kGroup:
    case StepKind::kCombine:
      for (int64_t place : {step.x, step.expert, step.offset, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      if (step.kind == StepKind::kCombine) places.push_back(step.place);
      break;
    case StepKind::kAttend:  // checks its own buffers
      break;
  }
  return places;
}

std::vector<int64_t> PlacesWritten(const Call& call, const Step& step) {
  std::vector<int64_t> places;
  if (step.kind == StepKind::kAttend) return places;
  if (step.kind != StepKind::kMultiply) {
    places = {step.total, step.out, step.out_scale, step.sizes};
    if (step.kind == StepKind::kGroup) places.push_back(step.place);
    if (step.kind == StepKind::kRoute) places.push_back(step.expert);
  } else {
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      places.push_back(call.products[i].places.out);
    }
  }
  places.erase(std::remove(places.begin(), places.end(), 0), places.end());
  return places;
}

}  // namespace jaxlowbit
