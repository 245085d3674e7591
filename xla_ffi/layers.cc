// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/layers.h"

#include <string>
#include <string_view>

#include "xla_ffi/guard.h"

namespace jaxlowbit {
namespace {

ffi::Error WrongPlace(int64_t place) {
  return InvalidArgument("the places of layers include " + std::to_string(place) +
                         ", which is no buffer that fits.");
}

int64_t Elements(const XLA_FFI_Buffer& buffer) {
  int64_t elements = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) elements *= buffer.dims[i];
  return elements;
}

}  // namespace

ffi::Error Layers::ReadOperand(const XLA_FFI_Args& args, const XLA_FFI_Rets& rets, int64_t place,
                               const XLA_FFI_Buffer* first, XLA_FFI_Buffer* operand) const {
  if (place > 0 && place <= args.size) {
    *operand = *static_cast<const XLA_FFI_Buffer*>(args.args[place - 1]);
    return ffi::Error::Success();
  }
  if (first == nullptr || place >= 0 || -place > rets.size) return WrongPlace(place);
  *operand = *first;
  const auto& result = *static_cast<const XLA_FFI_Buffer*>(rets.rets[-place - 1]);
  operand->data = result.data;
  const bool fits = result.dtype == first->dtype && Elements(result) == Elements(*first);
  return fits ? ffi::Error::Success() : WrongPlace(place);
}

void Layers::CopyAttributes(const XLA_FFI_Attrs& all) {
  attributes_ = all;
  for (int64_t i = 0; i < all.size; ++i) {
    if (std::string_view(all.names[i]->ptr, all.names[i]->len) == "layers") continue;
    attribute_types_.push_back(all.types[i]);
    attribute_names_.push_back(all.names[i]);
    attribute_values_.push_back(all.attrs[i]);
  }
  attributes_.size = static_cast<int64_t>(attribute_types_.size());
  attributes_.types = attribute_types_.data();
  attributes_.names = attribute_names_.data();
  attributes_.attrs = attribute_values_.data();
}

ffi::Error Layers::Read(ffi::RemainingArgs args, ffi::RemainingRets rets, RawAttributes attributes,
                        ffi::Span<const int64_t> numbers) {
  const XLA_FFI_Args& all_args = *RawArgs{args}.args();
  const XLA_FFI_Rets& all_rets = *RawRets{rets}.rets();
  const auto size = static_cast<int64_t>(numbers.size());
  const int64_t operands = size < 2 ? 0 : numbers.begin()[0];
  const int64_t results = size < 2 ? 0 : numbers.begin()[1];
  if (operands < 1 || results < 1 || size <= 2 || (size - 2) % (operands + results) != 0) {
    return InvalidArgument("the places of layers are " + std::to_string(size) +
                           " numbers, which are no layers of " + std::to_string(operands) +
                           " operands and " + std::to_string(results) + " results.");
  }
  count_ = (size - 2) / (operands + results);
  operands_.resize(count_ * operands);
  operand_pointers_.resize(operands_.size());
  result_pointers_.resize(count_ * results);
  arg_types_.assign(operands, XLA_FFI_ArgType_BUFFER);
  ret_types_.assign(results, XLA_FFI_RetType_BUFFER);
  args_.assign(count_, all_args);
  rets_.assign(count_, all_rets);
  const int64_t* place = numbers.begin() + 2;
  for (int64_t layer = 0; layer < count_; ++layer) {
    const int64_t first_operand = layer * operands, first_result = layer * results;
    for (int64_t i = 0; i < operands; ++i, ++place) {
      XLA_FFI_Buffer& operand = operands_[first_operand + i];
      const ffi::Error error =
          ReadOperand(all_args, all_rets, *place, layer == 0 ? nullptr : &operands_[i], &operand);
      if (error.failure()) return error;
      operand_pointers_[first_operand + i] = &operand;
    }
    for (int64_t i = 0; i < results; ++i, ++place) {
      if (*place >= 0 || -*place > all_rets.size) return WrongPlace(*place);
      result_pointers_[first_result + i] = all_rets.rets[-*place - 1];
    }
    args_[layer].size = operands;
    args_[layer].types = arg_types_.data();
    args_[layer].args = operand_pointers_.data() + first_operand;
    rets_[layer].size = results;
    rets_[layer].types = ret_types_.data();
    rets_[layer].rets = result_pointers_.data() + first_result;
  }
  CopyAttributes(*attributes.attrs);
  return ffi::Error::Success();
}

}  // namespace jaxlowbit
