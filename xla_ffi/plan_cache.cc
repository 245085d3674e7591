// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/plan_cache.h"

#include <cstring>

namespace jaxlowbit {
// Appends a size, and the bytes padded to whole numbers.
void CallKey::Append(const void* data, size_t bytes) {
  numbers.push_back(static_cast<int64_t>(bytes));
  const size_t end = numbers.size();
  numbers.resize(end + (bytes + sizeof(int64_t) - 1) / sizeof(int64_t));
  if (bytes > 0) std::memcpy(numbers.data() + end, data, bytes);
}

void CallKey::Read(ffi::RemainingArgs args, ffi::RemainingRets rets, RawAttributes attributes,
                   int64_t device, int64_t table) {
  const XLA_FFI_Args& raw_args = *RawArgs{args}.args();
  const XLA_FFI_Rets& raw_rets = *RawRets{rets}.rets();
  const XLA_FFI_Attrs& raw = *attributes.attrs;
  numbers.assign({device, table, raw.size, raw_args.size, raw_rets.size});
  pointers.clear();
  complete = true;
  for (int64_t i = 0; i < raw.size; ++i) {
    const XLA_FFI_AttrType type = raw.types[i];
    const void* attribute = raw.attrs[i];
    Append(raw.names[i]->ptr, raw.names[i]->len);
    numbers.push_back(type);
    if (type == XLA_FFI_AttrType_STRING) {
      const auto& text = *static_cast<const XLA_FFI_ByteSpan*>(attribute);
      Append(text.ptr, text.len);
    } else if (type == XLA_FFI_AttrType_SCALAR) {
      const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(attribute);
      const size_t bytes = ffi::ByteWidth(static_cast<ffi::DataType>(scalar.dtype));
      complete &= bytes > 0;
      numbers.push_back(scalar.dtype);
      Append(scalar.value, bytes);
    } else if (type == XLA_FFI_AttrType_ARRAY) {
      const auto& array = *static_cast<const XLA_FFI_Array*>(attribute);
      const size_t bytes = ffi::ByteWidth(static_cast<ffi::DataType>(array.dtype));
      complete &= bytes > 0;
      numbers.push_back(array.dtype);
      Append(array.data, array.size * bytes);
    } else {
      complete = false;
    }
  }
  for (int64_t i = 0; i < raw_args.size + raw_rets.size; ++i) {
    const bool is_arg = i < raw_args.size;
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(
        is_arg ? raw_args.args[i] : raw_rets.rets[i - raw_args.size]);
    pointers.push_back(buffer.data);
    numbers.push_back(buffer.dtype);
    Append(buffer.dims, buffer.rank * sizeof(int64_t));
  }
  hash = 0;
  for (int64_t number : numbers) {  // the upper bits are mixed in
    hash = (hash ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
}

}  // namespace jaxlowbit
