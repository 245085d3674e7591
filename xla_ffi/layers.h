// SPDX-License-Identifier: Apache-2.0
//
// A call that repeats another call for the layers of a model, so that kernels of consecutive layers overlap (PDL).
//
// Attribute `layers`, s64[2 + layers * (operands + results)]: the numbers of operands and results of the repeated call,
// then for each layer the places (call.h) in the whole call of these operands and results. An operand may be a result
// of an earlier layer: it has the type and shape of the same operand of the first layer. Other attributes are those of
// the repeated call.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/call.h"
#include "xla_ffi/ffi.h"

namespace jaxlowbit {

class Layers {
 public:
  // Reads a call with the attribute. The call must outlive this object.
  ffi::Error Read(ffi::RemainingArgs args, ffi::RemainingRets rets, RawAttributes attributes,
                  ffi::Span<const int64_t> numbers);

  int64_t count() const { return count_; }
  ffi::RemainingArgs args(int64_t layer) const { return {&args_[layer], 0}; }
  ffi::RemainingRets rets(int64_t layer) const { return {&rets_[layer], 0}; }
  RawAttributes attributes() const { return {&attributes_}; }

 private:
  ffi::Error ReadOperand(const XLA_FFI_Args& args, const XLA_FFI_Rets& rets, int64_t place,
                         const XLA_FFI_Buffer* first, XLA_FFI_Buffer* operand) const;
  void CopyAttributes(const XLA_FFI_Attrs& all);

  int64_t count_ = 0;
  std::vector<XLA_FFI_Buffer> operands_;
  std::vector<void*> operand_pointers_, result_pointers_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  std::vector<XLA_FFI_Args> args_;
  std::vector<XLA_FFI_Rets> rets_;
  XLA_FFI_Attrs attributes_ = {};
  std::vector<XLA_FFI_AttrType> attribute_types_;
  std::vector<XLA_FFI_ByteSpan*> attribute_names_;
  std::vector<void*> attribute_values_;
};

}  // namespace jaxlowbit
