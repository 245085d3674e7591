// SPDX-License-Identifier: Apache-2.0
//
// The weighted sum of the rows of a token's choices, for combine_choices.cu and for the normalization of the sum
// (rms_norm.cu).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/schedule/local_experts.cuh"
#include "cuda/ops/combine_choices.h"

namespace jaxlowbit {

inline constexpr int kTogether = 8;  // choices whose rows are loaded before any is added

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) ColumnsOf {
  T at[kCount];
};

// Loads from L2, as the expert of a choice below: this SM may have cached what earlier choices had at this address.
__device__ inline float LoadWeight(const CombineChoices& p, int64_t choice) {
  switch (p.weight_type) {
    case ElementType::kBf16:
      return __bfloat162float(__ldcg(static_cast<const __nv_bfloat16*>(p.weight) + choice));
    case ElementType::kF16:
      return __half2float(__ldcg(static_cast<const __half*>(p.weight) + choice));
    default:
      return __ldcg(static_cast<const float*>(p.weight) + choice);
  }
}

// The row of a choice; -1: none.
__device__ inline int RowOf(const CombineChoices& p, const LocalExperts& local, int64_t choice) {
  if (p.place != nullptr) return p.place[choice];
  return local.Position(__ldcg(p.expert + choice)) < p.experts ? static_cast<int>(choice) : -1;
}

// Up to kTogether choices of a token: their rows, and their weights.
class ChoiceRows {
 public:
  // `first`: the first choice of the token; `begin`: the first of these choices.
  __device__ ChoiceRows(const CombineChoices& p, const LocalExperts& local, int64_t first,
                        int begin) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool valid = begin + i < p.top;
      place_[i] = valid ? RowOf(p, local, first + begin + i) : -1;
      weight_[i] = valid ? LoadWeight(p, first + begin + i) : 0;
    }
  }

  // Adds vector `vector` of kCount columns of the rows, which have `vectors` of these, in order.
  template <int kCount>
  __device__ void Add(const float* rows, int64_t vectors, int64_t vector,
                      float (&sum)[kCount]) const {
    using Row = ColumnsOf<float, kCount>;
    Row row[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (place_[i] >= 0) row[i] = reinterpret_cast<const Row*>(rows)[place_[i] * vectors + vector];
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (place_[i] < 0) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum[j] = fmaf(weight_[i], row[i].at[j], sum[j]);
    }
  }

 private:
  int place_[kTogether];
  float weight_[kTogether];
};

}  // namespace jaxlowbit
