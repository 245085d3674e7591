// SPDX-License-Identifier: Apache-2.0
//
// A decoded custom call: products, steps and buffers, the same on every platform.
//
// Attributes of every call:
//
//   schema          s64, kSchema: the library that made the program has the same list of fields
//   layout_version  s64, kLayoutVersion (docs/layout.md)
//   caller          string, the public function that errors name
//   products        s64[kProductNumbers x products], encoded as in record.h; symbolic batch, m and num_weights are -1.
//                   Absent without products
//   numbers         f32[], the concatenated codebooks of the products that have one; absent without codebooks
//   steps           s64[kStepNumbers x steps]
//
// A call with the attribute `layers` runs several of these (layers.h).
//
// CUDA calls have one more result at the end: the workspace, u8[bytes].
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/codebook.h"
#include "cuda/problem.h"
#include "cuda/ways.h"
#include "xla_ffi/buffers.h"
#include "xla_ffi/record.h"

namespace jaxlowbit {

inline constexpr int64_t kLayoutVersion = 1;

// One product of a call, and the places of its buffers.
struct Product {
  QuantizedMatmul problem;
  Places places;
  const float* codebook = nullptr;  // [2^bits], or null: integers
};

// The attributes of a call. The instantiate stage has no other information.
class Attributes {
 public:
  explicit Attributes(ffi::Dictionary dictionary) : dictionary_(dictionary) {}

  // Returns a default value for a missing attribute, which `Check` reports.
  template <typename T>
  T Get(std::string_view name) {
    const auto value = dictionary_.get<T>(name);
    if (value.has_value()) return *value;
    if (missing_.empty()) missing_ = name;
    return T();
  }

  // Checks presence first, since XLA formats an error for a missing attribute.
  template <typename T>
  std::optional<T> Find(std::string_view name) const {
    if (!dictionary_.contains(name)) return std::nullopt;
    const auto value = dictionary_.get<T>(name);
    return value.has_value() ? std::optional<T>(*value) : std::nullopt;
  }

  std::string_view caller() const { return Find<std::string_view>("caller").value_or("jaxlowbit"); }

  // Returns an error if another version of the library made the program, or `Get` has missed an attribute.
  ffi::Error Check() const;
  // Returns an error if `Get` has missed an attribute.
  ffi::Error Missing() const;

  // Reads and checks products and steps, not their buffers.
  ffi::Error Decode(std::vector<Product>* products, std::vector<Step>* steps);

 private:
  ffi::Dictionary dictionary_;
  std::string missing_;
};

// A call with its buffers.
class Call {
 public:
  Call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary dictionary)
      : attributes(dictionary), args_(args), rets_(rets) {}

  // Decodes the attributes and checks every buffer of a product against its record.
  ffi::Error Decode();

  // The buffer at a place, which `Decode` must have read or `Has` must have found.
  ffi::AnyBuffer At(int64_t place) const {
    return place > 0 ? args_.get<ffi::AnyBuffer>(place - 1).value()
                     : *rets_.get<ffi::AnyBuffer>(-place - 1).value();
  }
  bool Has(int64_t place) const {
    return place > 0 ? place <= static_cast<int64_t>(args_.size())
                     : place < 0 && -place <= static_cast<int64_t>(rets_.size());
  }
  // The extent of the buffer at a place; empty for place 0.
  Extent ExtentAt(int64_t place) const { return place == 0 ? Extent() : ExtentOf(At(place)); }
  void* DataAt(int64_t place) const { return place == 0 ? nullptr : At(place).untyped_data(); }

  // The number of a place among the pointers of the call: operands, then results.
  Address AddressAt(int64_t place) const {
    const int64_t number = place > 0 ? place : static_cast<int64_t>(args_.size()) - place;
    return place == 0 ? Address() : Address{static_cast<int>(number) - 1, 0};
  }

  ffi::RemainingArgs args() const { return args_; }
  ffi::RemainingRets rets() const { return rets_; }

  Attributes attributes;
  std::vector<Product> products;
  std::vector<Step> steps;
  std::vector<Operands> operands;  // one for each product

 private:
  ffi::Error CheckPlaces() const;
  ffi::Error FindSizes(const Places& places, QuantizedMatmul* problem) const;
  ffi::Error Read(Product* product, Operands* operands) const;

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
};

// Places of the buffers that a step reads, and of those it writes; none for attention.
std::vector<int64_t> PlacesRead(const Call& call, const Step& step);
std::vector<int64_t> PlacesWritten(const Call& call, const Step& step);

}  // namespace jaxlowbit
