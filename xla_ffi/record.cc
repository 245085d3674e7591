// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/record.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "xla_ffi/bind.h"

namespace nb = nanobind;

namespace jaxlowbit {
namespace {

// Encodes a field's value as a number; enums are given by name.
template <typename Field>
int64_t NumberOf(const char* name, const nb::handle& value) {
  int64_t number;
  if constexpr (std::is_enum_v<Field>) {
    const auto text = nb::cast<std::string>(nb::str(value));
    const Names names = NamesOf(Field());
    for (number = 0; number < names.count && text != names.begin[number];) ++number;
    if (number == names.count) {
      throw nb::value_error((std::string(name) + " has no value " + text).c_str());
    }
  } else {
    number = nb::cast<int64_t>(value);
    Field field;
    if (!Set(number, &field)) {
      throw nb::value_error((std::string(name) + " cannot be " + std::to_string(number)).c_str());
    }
  }
  return number;
}

// Appends the number of each field, given or default, and counts the given ones.
struct Lister {
  const nb::kwargs& given;
  std::vector<int64_t> numbers = {};
  size_t found = 0;

  template <typename Field>
  void operator()(const char* name, const Field& value) {
    if (!given.contains(name)) {
      numbers.push_back(static_cast<int64_t>(value));
      return;
    }
    ++found;
    numbers.push_back(NumberOf<Field>(name, given[name]));
  }

  std::vector<int64_t> Finish() const {
    if (found == given.size()) return numbers;
    throw nb::type_error("a name that is no field was given");
  }
};

std::vector<int64_t> ListProduct(const nb::kwargs& fields) {
  const QuantizedMatmul problem;
  const Places places;
  Lister list{fields};
  VisitRecord(problem, [&](const char* name, const auto& field) { list(name, field); });
  VisitPlaces(places, [&](const char* name, const auto& field) {
    // A type and a buffer may share a name, so places end in _at.
    list((std::string(name) + "_at").c_str(), field);
  });
  return list.Finish();
}

std::vector<int64_t> ListStep(const nb::kwargs& fields) {
  const Step step;
  Lister list{fields};
  VisitStep(step, [&](const char* name, const auto& field) { list(name, field); });
  return list.Finish();
}

// Names of the fields, for tools that decode the numbers in a program.
nb::tuple NamesOfProduct() {
  nb::list names;
  const QuantizedMatmul problem;
  const Places places;
  VisitRecord(problem, [&](const char* name, const auto&) { names.append(name); });
  VisitPlaces(places, [&](const char* name, const auto&) {
    names.append((std::string(name) + "_at").c_str());
  });
  return nb::tuple(names);
}

nb::tuple NamesOfStep() {
  nb::list names;
  const Step step;
  VisitStep(step, [&](const char* name, const auto&) { names.append(name); });
  return nb::tuple(names);
}

}  // namespace

void BindRecords(nb::module_& module) {
  module.def("product", &ListProduct, nb::arg("fields"));
  module.def("step", &ListStep, nb::arg("fields"));
  module.attr("SCHEMA") = kSchema;
  module.attr("PRODUCT_FIELDS") = NamesOfProduct();
  module.attr("STEP_FIELDS") = NamesOfStep();
}

}  // namespace jaxlowbit
