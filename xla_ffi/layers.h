// SPDX-License-Identifier: Apache-2.0
//
// A call that runs several inner calls in order, such as the layers of a model, so that their kernels overlap (PDL).
//
// Attribute `layers`, s64[]: for each inner call its kind, its numbers of operands and results, and their places
// (call.h) in the whole call. An operand may be a result of an earlier inner call. The attribute `NAME.K` becomes the
// attribute NAME of inner calls of kind K; every inner call gets the other attributes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "xla_ffi/call.h"
#include "xla_ffi/ffi.h"
#include "xla_ffi/guard.h"

namespace jaxlowbit {

class Layers {
 public:
  // Reads the attributes of a call, which must outlive this object. `numbers`: the attribute `layers`.
  ffi::Error Read(RawAttributes attributes, ffi::Span<const int64_t> numbers);
  // Finds the buffers of the inner calls.
  ffi::Error Bind(ffi::RemainingArgs args, ffi::RemainingRets rets);

  size_t kinds() const { return kinds_.size(); }
  RawAttributes attributes_of(size_t kind) const { return {&kinds_[kind].attributes}; }

  size_t count() const { return layers_.size(); }
  RawAttributes attributes(size_t layer) const { return attributes_of(layers_[layer].kind); }
  ffi::RemainingArgs args(size_t layer) const { return {&args_[layer], 0}; }
  ffi::RemainingRets rets(size_t layer) const { return {&rets_[layer], 0}; }

 private:
  struct Layer {
    int64_t kind, operands, results;
    const int64_t* places;
  };
  struct Kind {
    std::vector<XLA_FFI_AttrType> types;
    std::vector<XLA_FFI_ByteSpan> spans;
    std::vector<XLA_FFI_ByteSpan*> names;
    std::vector<void*> values;
    XLA_FFI_Attrs attributes;
  };

  static Kind KindOf(const XLA_FFI_Attrs& all, int64_t number);

  std::vector<Layer> layers_;
  std::vector<Kind> kinds_;
  std::vector<void*> buffers_;  // operands, then results, of each inner call
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  std::vector<XLA_FFI_Args> args_;
  std::vector<XLA_FFI_Rets> rets_;
};

// The attribute `layers` of a call that has it.
inline std::optional<ffi::Span<const int64_t>> FindLayers(RawAttributes attributes) {
  return Attributes(ffi::Dictionary(attributes.attrs)).Find<ffi::Span<const int64_t>>("layers");
}

// Calls `run(args, rets, attributes)` for each inner call, and returns the first error.
template <typename Run>
ffi::Error ForEachLayer(ffi::Span<const int64_t> numbers, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, RawAttributes attributes, const Run& run) {
  Layers layers;
  ffi::Error error = layers.Read(attributes, numbers);
  if (error.success()) error = layers.Bind(args, rets);
  if (error.failure()) {
    return Named(Attributes(ffi::Dictionary(attributes.attrs)).caller(), error);
  }
  for (size_t i = 0; error.success() && i < layers.count(); ++i) {
    error = run(layers.args(i), layers.rets(i), layers.attributes(i));
  }
  return error;
}

// Calls `run(attributes)` for each kind of inner call, or once for a call without any, and returns the first error.
template <typename Run>
ffi::Error ForEachKind(RawAttributes attributes, const Run& run) {
  const auto numbers = FindLayers(attributes);
  if (!numbers) return run(attributes);
  Layers layers;
  ffi::Error error = layers.Read(attributes, *numbers);
  for (size_t i = 0; error.success() && i < layers.kinds(); ++i) {
    error = run(layers.attributes_of(i));
  }
  return error;
}

}  // namespace jaxlowbit
