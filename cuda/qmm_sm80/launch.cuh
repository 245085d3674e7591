// SPDX-License-Identifier: Apache-2.0
//
// The table of instances, for the product and the transposed product (`Product` names the kernel,
// Product::kKernel<Instance<...>>), and the launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

#include "cuda/kernels.h"
#include "cuda/launch_config.h"
#include "cuda/qmm_sm80/params.cuh"

namespace jaxlowbit::qmm_sm80 {

using KernelFunction = void (*)(Params);

template <class Product, typename T, typename S, int kBits>
KernelFunction Find(int block_m) {
  switch (block_m) {
    case 8:
      return Product::template kKernel<Instance<T, S, 8, kBits>>;
    case 16:
      return Product::template kKernel<Instance<T, S, 16, kBits>>;
    case 32:
      return Product::template kKernel<Instance<T, S, 32, kBits>>;
    case 64:
      return Product::template kKernel<Instance<T, S, 64, kBits>>;
  }
  return nullptr;
}

template <class Product, typename T>
KernelFunction Find(ElementType scale, int bits, int block_m) {
  if (scale == ElementType::kF32) {
    return bits == 4 ? Find<Product, T, float, 4>(block_m) : Find<Product, T, float, 8>(block_m);
  }
  return bits == 4 ? Find<Product, T, T, 4>(block_m) : Find<Product, T, T, 8>(block_m);
}

template <class Product>
KernelFunction Find(const QuantizedMatmul& problem, int block_m) {
  return problem.lhs == ElementType::kBf16
             ? Find<Product, __nv_bfloat16>(problem.scale, problem.bits, block_m)
             : Find<Product, __half>(problem.scale, problem.bits, block_m);
}

// Loads a kernel and lets it have all the shared memory it may ask for.
inline cudaError_t Prepare(KernelFunction kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
}

template <class Product>
cudaError_t Initialize() {
  QuantizedMatmul problem;
  for (ElementType lhs : {ElementType::kBf16, ElementType::kF16}) {
    for (ElementType scale : {ElementType::kF32, lhs}) {
      for (int bits : {4, 8}) {
        for (int block_m : {8, 16, 32, 64}) {
          problem.lhs = lhs, problem.scale = scale, problem.bits = bits;
          const cudaError_t error = Prepare(Find<Product>(problem, block_m));
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

inline Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers,
                       const Choice& choice) {
  const int block_k = BlockK(problem.bits);
  Params p;
  p.lhs = buffers.lhs;
  p.packed = buffers.packed;
  p.scale = buffers.scale;
  p.zero = buffers.zero;
  p.zero_bytes = static_cast<int>(problem.zero_bytes());
  p.index = buffers.index;
  p.out = choice.split_k > 1 ? buffers.workspace : buffers.out;
  p.batch = problem.batch;
  p.num_weights = problem.num_weights;
  p.m = problem.m;
  p.lhs_columns = problem.lhs_columns();
  p.out_columns = problem.out_columns();
  p.out_columns_padded = problem.weights_per_element() * CeilDiv(p.out_columns, kAtom) * kAtom;
  p.atom_step = problem.epilogue.gated ? static_cast<int>(problem.n_blocks()) : 1;
  p.m_tiles = CeilDiv(problem.m, choice.block_m);
  p.out_tiles = OutTiles(problem);
  p.stages = static_cast<int>(CeilDiv(p.lhs_columns, block_k));
  p.n_blocks = static_cast<int>(problem.n_blocks());
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  p.group_size = problem.group_size < 0 ? INT_MAX : static_cast<int>(problem.group_size);
  p.block_groups = block_k / p.group_size;
  p.block_rest = block_k % p.group_size;
  p.groups_per_stage = GroupsPer(problem.transposed ? kAtom : block_k, problem.group_size);
  p.split_k = choice.split_k;
  p.out_float = problem.out == ElementType::kF32;
  p.lhs_aligned = problem.lhs_aligned && p.lhs_columns % (kCopyBytes / 2) == 0;
  p.weights_aligned = problem.weights_aligned;
  p.bytes = StageBytesOf(choice.block_m, problem.bits, problem.group_size,
                         static_cast<int>(problem.scale_bytes()), p.zero_bytes, problem.transposed);
  p.slot_bytes = p.bytes.total();
  p.epilogue = EpilogueOf(problem, buffers);
  return p;
}

inline cudaError_t Launch(KernelFunction kernel, const QuantizedMatmul& problem,
                          const Buffers& buffers, const Choice& choice, cudaStream_t stream) {
  const Params p = ParamsOf(problem, buffers, choice);
  const int64_t ctas = p.m_tiles * p.out_tiles * p.split_k * p.batch;
  const int shared_bytes =
      SharedBytes(choice.block_m, problem.bits, problem.group_size,
                  static_cast<int>(problem.scale_bytes()), p.zero_bytes, problem.transposed);
  const LaunchConfig launch(ctas, kThreads, shared_bytes, stream);
  return cudaLaunchKernelEx(&launch.config, kernel, p);
}

}  // namespace jaxlowbit::qmm_sm80
