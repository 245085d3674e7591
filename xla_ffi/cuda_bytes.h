// SPDX-License-Identifier: Apache-2.0
//
// What a product has beside the operands of operands.h where its lhs are quantized values (Buffers in cuda/problem.h):
//
//   lhs_scale      f32[b, m]: those of the rows of lhs; f32[0] where out is s32
//   channel_scale  f32[L, n_blocks, 64], in order, beside s8 scales; otherwise, and where out is s32, f32[0]
//
// No kernel stands in where buffers begin at odd places, so weights there are refused.
#pragma once

#include "cuda/ops/quantize_rows.h"
#include "cuda/select/cache.h"
#include "xla_ffi/cuda_enqueue.h"

namespace jaxlowbit {

inline ffi::Error CheckFloats(std::string_view name, const ffi::AnyBuffer& buffer) {
  return CheckType(name, buffer, buffer.element_type() == ffi::DataType::F32, "f32");
}

// Adds scales to a product that has been decoded, or says why no kernel computes it at that place.
inline ffi::Error AddScales(ffi::AnyBuffer lhs_scale, ffi::AnyBuffer channel_scale,
                            const Place& place, Operands* operands) {
  QuantizedMatmul& p = operands->problem;
  ffi::Error error = CheckFloats("lhs_scale", lhs_scale);
  if (error.success() && !p.sums_integers()) {
    error = CheckShape("lhs_scale", lhs_scale, {p.batch, p.m}, "[batch, m]");
  }
  if (error.success()) error = CheckFloats("channel_scale", channel_scale);
  const bool scales_channels = p.scale == ElementType::kInt8 && !p.sums_integers();
  if (error.success() && scales_channels) {
    error = CheckShape("channel_scale", channel_scale, {p.num_weights, p.n_blocks(), kAtom},
                       "[weights, n_blocks, 64]");
  }
  if (error.failure()) return error;
  Buffers& b = operands->buffers;
  if (!p.sums_integers()) b.lhs_scale = static_cast<const float*>(lhs_scale.untyped_data());
  if (scales_channels) {
    p.epilogue.units = p.n_blocks() * kAtom;
    b.unit = static_cast<const float*>(channel_scale.untyped_data());
  }
  const Kernel kernel = p.scales_rows ? Kernel::kQmmSm90Stream : Kernel::kQmmSm90;
  if (const Support support = SupportsCached(kernel, p, DeviceInfo(place.device)); !support) {
    return Refuse(support.reason + "; use another backend.");
  }
  const bool aligned = IsAligned(b.packed) && IsAligned(b.scale) && IsAligned(b.zero);
  if (place.stage == Stage::kExecute && !aligned) {
    return Refuse(
        "weights beside quantized activations must begin at multiples of 16 bytes; put "
        "jax.lax.optimization_barrier around them.");
  }
  return error;
}

}  // namespace jaxlowbit
