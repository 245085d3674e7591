// SPDX-License-Identifier: Apache-2.0

#include <climits>

#include "cuda/kernels/launch_config.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/params.h"
#include "cuda/kernels/sm80/launch.h"
#include "cuda/kernels/sm80/params.cuh"
#include "cuda/kernels/sm80/select.h"
#include "cuda/ops/reduce_splits.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm80 {
namespace {

// All parameters but the pointers.
Params ParamsOf(const QuantizedMatmul& problem, const Addresses& buffers, const Choice& choice) {
  const int block_k = BlockK(problem.bits);
  Params p = {};
  p.zero_bytes = static_cast<int>(problem.zero_bytes());
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
  p.units = UnitsOf(problem);
  if (problem.is_ragged()) p.ragged = RaggedOf(problem, choice.block_m, p.out_tiles);
  return p;
}

class Sm80Launch final : public KernelLaunch {
 public:
  Sm80Launch(const PlannedStep& step, const Device& device, const void* function)
      : problem_(step.problem),
        device_(device),
        function_(function),
        params_(ParamsOf(step.problem, step.products.front().buffers, step.choice)),
        ctas_(params_.out_tiles * (step.problem.is_ragged()
                                       ? MaxBlocks(step.problem, step.choice.block_m)
                                       : params_.m_tiles * params_.split_k * params_.batch)),
        shared_bytes_(SharedBytesOf(step.problem, step.choice.block_m)) {}

  cudaError_t Launch(const Buffers* products, cudaStream_t stream) const override {
    const Buffers& b = *products;
    Params p = params_;
    p.lhs = b.lhs;
    p.packed = b.packed;
    p.scale = b.scale;
    p.zero = b.zero;
    p.index = b.index;
    p.out = p.split_k > 1 ? b.workspace : b.out;
    p.epilogue.bias = b.bias;
    p.epilogue.residual = b.residual;
    p.units.data = b.unit;
    p.units.index = b.index;
    p.ragged.sizes = b.group_sizes;
    p.ragged.offset = b.group_offset;
    const LaunchConfig config(ctas_, kThreads, shared_bytes_, stream);
    const cudaError_t error = LaunchFunction(config, function_, &p);
    if (error != cudaSuccess || p.split_k == 1) return error;
    return LaunchReduceSplits(problem_, b, p.split_k, device_, stream);
  }

 private:
  const QuantizedMatmul problem_;
  const Device& device_;
  const void* const function_;
  const Params params_;
  const int64_t ctas_, shared_bytes_;
};

}  // namespace

cudaError_t Load(const void* function) { return AllowSharedMemory(function, kMaxSharedBytes); }

cudaError_t Load(const PlannedStep& step, const Device& device,
                 std::unique_ptr<const KernelLaunch>* launch) {
  const void* function = nullptr;
  const cudaError_t error = KernelOn(device, KeyOf(step.problem, step.choice, device), &function);
  if (error == cudaSuccess) *launch = std::make_unique<Sm80Launch>(step, device, function);
  return error;
}

}  // namespace jaxlowbit::sm80
