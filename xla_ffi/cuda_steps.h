// SPDX-License-Identifier: Apache-2.0
//
// Steps of a call that round rows or attend: their kernels, and where their buffers are.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/launch.h"
#include "cuda/ops/attend.h"
#include "cuda/ops/quantize_rows.h"
#include "xla_ffi/attend_operands.h"

namespace jaxlowbit {

class RoundStep final : public LoadedStep {
 public:
  // The pointers of `rows` are not set.
  RoundStep(const QuantizeRows& rows, const Address& floats, const Address& factor,
            const Address& values, const Address& scale)
      : rows_(rows), floats_(floats), factor_(factor), values_(values), scale_(scale) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    QuantizeRows rows = rows_;
    rows.floats = PointerTo(floats_, pointers);
    rows.factor = static_cast<const float*>(PointerTo(factor_, pointers));
    rows.values = PointerTo(values_, pointers);
    rows.scale = static_cast<float*>(PointerTo(scale_, pointers));
    return LaunchQuantizeRows(rows, stream);
  }

 private:
  const QuantizeRows rows_;
  const Address floats_, factor_, values_, scale_;
};

class AttendStep final : public LoadedStep {
 public:
  // The pointers of `attend` are not set. `results`: the number of the first result.
  AttendStep(const Attend& attend, const AttendBuffers& buffers, int results, const Room& room,
             const Device& device)
      : attend_(attend),
        query_norm_(buffers.query_norm.element_count() > 0),
        key_norm_(buffers.key_norm.element_count() > 0),
        numbers_(buffers.numbers),
        results_(results),
        room_(room),
        device_(device) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    Attend attend = attend_;
    SetPointers(pointers, pointers + results_, numbers_, query_norm_, key_norm_, &attend);
    return LaunchAttend(attend, PointerTo(room_.workspace, pointers), room_.bytes, device_, stream);
  }

 private:
  const Attend attend_;
  const bool query_norm_, key_norm_;
  const AttendNumbers numbers_;
  const int results_;
  const Room room_;
  const Device& device_;
};

}  // namespace jaxlowbit
