// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/layers.h"

#include <algorithm>
#include <string>
#include <string_view>

namespace jaxlowbit {
namespace {

constexpr int64_t kHeader = 3;  // kind, operands, results

ffi::Error Malformed(const std::string& what) {
  return InvalidArgument("the attribute layers " + what +
                         "; compile the program with the library that runs it.");
}

}  // namespace

// Attributes are sorted by name, and remain so without the kind: names contain nothing below '.'.
Layers::Kind Layers::KindOf(const XLA_FFI_Attrs& all, int64_t number) {
  Kind kind;
  const std::string suffix = "." + std::to_string(number);
  for (int64_t i = 0; i < all.size; ++i) {
    const std::string_view name(all.names[i]->ptr, all.names[i]->len);
    const size_t end = name.find('.');
    if (name == "layers" || (end != name.npos && name.substr(end) != suffix)) continue;
    kind.types.push_back(all.types[i]);
    kind.spans.push_back({all.names[i]->ptr, std::min(end, name.size())});
    kind.values.push_back(all.attrs[i]);
  }
  for (XLA_FFI_ByteSpan& span : kind.spans) kind.names.push_back(&span);
  kind.attributes = all;
  kind.attributes.size = static_cast<int64_t>(kind.types.size());
  kind.attributes.types = kind.types.data();
  kind.attributes.names = kind.names.data();
  kind.attributes.attrs = kind.values.data();
  return kind;
}

ffi::Error Layers::Read(RawAttributes attributes, ffi::Span<const int64_t> numbers) {
  int64_t kinds = 0;
  for (const int64_t* at = numbers.begin(); at < numbers.end();) {
    const int64_t left = numbers.end() - at - kHeader;
    if (left < 0) return Malformed("ends within a layer");
    const Layer layer = {at[0], at[1], at[2], at + kHeader};
    if (layer.kind < 0 || layer.kind > kinds || layer.operands < 0 || layer.operands > left ||
        layer.results < 0 || layer.results > left - layer.operands) {
      return Malformed("has a layer of kind " + std::to_string(layer.kind) + " with " +
                       std::to_string(layer.operands) + " operands and " +
                       std::to_string(layer.results) + " results");
    }
    kinds = std::max(kinds, layer.kind + 1);
    layers_.push_back(layer);
    at = layer.places + layer.operands + layer.results;
  }
  for (int64_t i = 0; i < kinds; ++i) kinds_.push_back(KindOf(*attributes.attrs, i));
  return ffi::Error::Success();
}

ffi::Error Layers::Bind(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const XLA_FFI_Args& all_args = *RawArgs{args}.args();
  const XLA_FFI_Rets& all_rets = *RawRets{rets}.rets();
  int64_t operands = 0, results = 0;
  for (const Layer& layer : layers_) {
    operands = std::max(operands, layer.operands);
    results = std::max(results, layer.results);
    for (int64_t i = 0; i < layer.operands + layer.results; ++i) {
      const int64_t place = layer.places[i];
      const bool is_arg = place > 0 && place <= all_args.size && i < layer.operands;
      if (!is_arg && (place >= 0 || -place > all_rets.size)) {
        return Malformed("has the place " + std::to_string(place) + ", which no buffer has");
      }
      buffers_.push_back(is_arg ? all_args.args[place - 1] : all_rets.rets[-place - 1]);
    }
  }
  arg_types_.assign(operands, XLA_FFI_ArgType_BUFFER);
  ret_types_.assign(results, XLA_FFI_RetType_BUFFER);
  void** buffers = buffers_.data();
  for (const Layer& layer : layers_) {
    args_.push_back(all_args);
    args_.back().size = layer.operands;
    args_.back().types = arg_types_.data();
    args_.back().args = buffers;
    rets_.push_back(all_rets);
    rets_.back().size = layer.results;
    rets_.back().types = ret_types_.data();
    rets_.back().rets = buffers + layer.operands;
    buffers += layer.operands + layer.results;
  }
  return ffi::Error::Success();
}

}  // namespace jaxlowbit
