// SPDX-License-Identifier: Apache-2.0

#include <climits>

#include "cuda/kernels/launch_config.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/params.h"
#include "cuda/kernels/sm80/launch.h"
#include "cuda/kernels/sm80/params.cuh"
#include "cuda/kernels/sm80/select.h"
#include "cuda/ops/reduce_splits.h"

namespace jaxlowbit::sm80 {
namespace {

Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice) {
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
  p.table = TableOf(problem, buffers);
  p.units = UnitsOf(problem, buffers);
  return p;
}

}  // namespace

cudaError_t Load(const void* function) { return AllowSharedMemory(function, kMaxSharedBytes); }

cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                   const Device& device, cudaStream_t stream) {
  const void* function = nullptr;
  cudaError_t error = KernelOn(device, KeyOf(problem, choice, device), &function);
  if (error != cudaSuccess) return error;
  Params p = ParamsOf(problem, buffers, choice);
  const int64_t ctas = p.m_tiles * p.out_tiles * p.split_k * p.batch;
  const LaunchConfig launch(ctas, kThreads, SharedBytesOf(problem, choice.block_m), stream);
  error = LaunchFunction(launch, function, &p);
  if (error != cudaSuccess || choice.split_k == 1) return error;
  return LaunchReduceSplits(problem, buffers, choice.split_k, device, stream);
}

}  // namespace jaxlowbit::sm80
