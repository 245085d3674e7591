// SPDX-License-Identifier: Apache-2.0
//
// qmm_sm90: the product of qmm_sm80.cu for more tokens on Hopper, with products of warpgroups whose
// weights come from registers.
//
// Bound. The tensor cores, from about 50 tokens on; so what counts is that they always have a product
// to do, while other warps, or the same ones for their next product, dequantize and copy.
//
// Decomposition. Weights are operand A of the instruction: a strip is its 64 output channels. A CTA
// computes tiles of some strips x tokens (kTiles in config.h), one after the other:
//
//                tokens ──►                       1 to 3 warpgroups multiply, each with strips of
//             ┌──────────┐                        its own and all tokens; one more warp copies.
//   channels  │ strip 0  │ warpgroup 0            Tiles that are left when every CTA has had the
//      │      ├──────────┤                        same number are divided along k, so that all CTAs
//      ▼      │ strip 1  │ warpgroup 1            have a part of them.
//             └──────────┘
//
// Pipeline.   last warp: wait for a free slot ─► bulk copies of codes, lhs, scales   (fill.cuh)
//             warpgroups: wait for a full slot ─► dequantize ─► wgmma ─► free it     (multiply.cuh)
//             end of a tile: epilogue ─► store                                      (store.cuh)
//             end of a part: sums to the workspace, for a kernel that adds them     (reduce.cuh)
//
// Gated. Strips of a CTA are in pairs: the same channels of the gate and of up. Tiles with an odd
// number of strips are not for these.
//
// Storage. Codes are in the order of the fragments (device/layout.cuh), which are those of mma.sync:
// warp w of the warpgroup owns rows 16 w to 16 w + 15 of a strip.
//
// The kernel itself is in qmm_sm90/kernel.cuh. Limits: Unsupported() in dispatch.cc.

#include <algorithm>

#include "cuda/extents.h"
#include "cuda/kernels.h"
#include "cuda/launch_config.h"
#include "cuda/qmm_sm90/instances.h"
#include "cuda/qmm_sm90/params.cuh"
#include "cuda/qmm_sm90/reduce.cuh"
#include "cuda/tensor_map.h"

namespace jaxlowbit {
namespace qmm_sm90 {
namespace {

KernelFunction Find(const QuantizedMatmul& problem, int tile) {
  const auto find =
      problem.lhs == ElementType::kBf16
          ? (problem.bits == 4 ? FindKernel<__nv_bfloat16, 4> : FindKernel<__nv_bfloat16, 8>)
          : (problem.bits == 4 ? FindKernel<__half, 4> : FindKernel<__half, 8>);
  return find(problem.scale == ElementType::kF32, problem.zero, tile);
}

// Of results that are stored in boxes.
Form FormOf(const Epilogue& epilogue) {
  switch (epilogue.activation) {
    case Activation::kNone:
      return epilogue.gated ? Form::kOther : Form::kSum;
    case Activation::kSilu:
    case Activation::kGeluTanh:
      return Form::kSigmoid;
    case Activation::kRelu:
      return epilogue.gated ? Form::kOther : Form::kRelu;
    case Activation::kGelu:
      return epilogue.gated ? Form::kOther : Form::kGelu;
  }
  return Form::kOther;
}

Params ParamsOf(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                const Division& division) {
  const TileShape& tile = kTiles[choice.tile];
  Params p;
  p.scale = buffers.scale;
  p.zero = buffers.zero;
  p.zero_bytes = static_cast<int>(problem.zero_bytes());
  p.index = buffers.index;
  p.out_elements = buffers.out;
  p.out_float = problem.out == ElementType::kF32;
  p.aligned = !p.out_float && SupportsBoxes(problem.n) && IsAligned(buffers.out);
  p.epilogue = EpilogueOf(problem, buffers);
  const bool boxes = buffers.residual != nullptr && problem.epilogue.residual == problem.lhs &&
                     !problem.epilogue.gated && IsAligned(buffers.residual);
  p.form =
      p.aligned && (boxes || buffers.residual == nullptr) ? FormOf(problem.epilogue) : Form::kOther;
  p.residual_boxes = boxes && p.form != Form::kOther;
  p.num_weights = problem.num_weights;
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.lhs_tokens = tile.tokens / choice.mates;
  if (choice.mates == 1) p.lhs_tokens = std::min(p.lhs_tokens, p.m);
  p.n_blocks = static_cast<int>(problem.n_blocks());
  p.strips = static_cast<int>(problem.strips());
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  const int64_t size = problem.group_size;
  p.atoms_per_group = Divider::By(size < 0 ? p.k_blocks : std::max(size / kAtom, int64_t{1}));
  p.groups_per_atom = size > 0 && size < kAtom ? static_cast<int>(kAtom / size) : 1;
  const int64_t tiles_m = CeilDiv(problem.m, tile.tokens);
  p.tiles_n = static_cast<int>(CeilDiv(p.strips, tile.cta_strips() * choice.mates));
  p.batch_tiles = WideDivider::By(tiles_m * p.tiles_n);
  p.band_tiles = WideDivider::By(tiles_m * kBand);
  p.last_width = WideDivider::By(p.tiles_n % kBand == 0 ? kBand : p.tiles_n % kBand);
  p.mate_shift = choice.mates - 1;
  p.whole_tiles = static_cast<int>(division.whole_tiles);
  p.parts = division.parts;
  p.num_tasks = static_cast<int>(division.tasks());
  p.sums = static_cast<float*>(buffers.workspace);
  p.plan = PlanOf(problem, tile);
  return p;
}

cudaError_t LaunchReduceParts(const QuantizedMatmul& problem, const Division& division,
                              const TileShape& tile, const Params& p, cudaStream_t stream) {
  const int64_t strips = tile.cta_strips() / problem.weights_per_element();
  const dim3 grid(static_cast<unsigned>(tile.tokens / 8), static_cast<unsigned>(strips),
                  static_cast<unsigned>(division.divided_tiles));
  const LaunchConfig launch(grid, kReduceThreads, 0, stream, true);
  const auto kernel = problem.lhs == ElementType::kBf16 ? ReducePartsKernel<__nv_bfloat16>
                                                        : ReducePartsKernel<__half>;
  return cudaLaunchKernelEx(&launch.config, kernel, p, tile.cta_strips(), tile.tokens);
}

}  // namespace
}  // namespace qmm_sm90

// Also finds out how many clusters of each size run at a time: of the kernels of a tile, which have
// the same shape, any.
cudaError_t InitializeQmmSm90(Device& device) {
  using namespace qmm_sm90;
  const cudaError_t found = InitializeTensorMaps();
  if (found != cudaSuccess) return found;
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const auto kernel : {ReducePartsKernel<__nv_bfloat16>, ReducePartsKernel<__half>}) {
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  QuantizedMatmul problem;
  for (int number = 0; number < kNumTiles; ++number) {
    const TileShape& tile = kTiles[number];
    for (ElementType lhs : {ElementType::kF16, ElementType::kBf16}) {
      for (ElementType scale : {ElementType::kF32, lhs}) {
        for (ZeroKind zero : {ZeroKind::kNone, ZeroKind::kInteger, ZeroKind::kFloat}) {
          for (int bits : {8, 4}) {
            problem.lhs = lhs, problem.scale = scale, problem.zero = zero, problem.bits = bits;
            const cudaError_t error = cudaFuncSetAttribute(
                Find(problem, number), cudaFuncAttributeMaxDynamicSharedMemorySize,
                SharedBytes(tile));
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
    for (int cluster_ctas : {1, 2, 4}) {
      const LaunchConfig launch(cluster_ctas, tile.threads(), SharedBytes(tile), nullptr, false,
                                cluster_ctas);
      const cudaError_t error = cudaOccupancyMaxActiveClusters(
          &device.clusters[tile.ctas_per_sm][cluster_ctas], Find(problem, number), &launch.config);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchQmmSm90(const QuantizedMatmul& problem, const Buffers& buffers,
                          const Choice& choice, const Device& device, cudaStream_t stream) {
  using namespace qmm_sm90;
  const TileShape& tile = kTiles[choice.tile];
  const Division division = DivisionOf(problem, tile, choice.mates, choice.split_k, device.num_sms);
  Params p = ParamsOf(problem, buffers, choice, division);
  cudaError_t error = DescribeMatrices(buffers.lhs, problem.lhs, problem.batch, problem.m,
                                       problem.k, p.lhs_tokens, &p.lhs);
  if (error != cudaSuccess) return error;
  constexpr int64_t kRowBytes = 128;  // and 64 elements of 16 bits
  const int64_t atom_rows = problem.words_per_atom() * 4 / kRowBytes;
  error = DescribeMatrices(buffers.packed, problem.lhs, problem.num_weights * problem.n_blocks(),
                           problem.k_blocks() * atom_rows, kAtom,
                           static_cast<int>(tile.stage_atoms * atom_rows), &p.codes);
  if (error != cudaSuccess) return error;
  if (p.aligned) {
    const bool halves = p.form == Form::kSigmoid && p.epilogue.gated && tile.strips == 1;
    const int box = halves ? GatedBoxTokens(tile) : StoreTokens(tile);
    error = DescribeMatrices(buffers.out, problem.out, problem.batch, problem.m, problem.n, box,
                             &p.out);
    if (error != cudaSuccess) return error;
    if (p.residual_boxes) {
      error = DescribeMatrices(buffers.residual, problem.out, problem.batch, problem.m, problem.n,
                               box, &p.residual);
      if (error != cudaSuccess) return error;
    }
  }
  const int64_t clusters = std::min(division.tasks(), division.resident);
  const LaunchConfig launch(clusters * choice.mates, tile.threads(), p.plan.shared_bytes(), stream,
                            problem.early_start, choice.mates);
  error = cudaLaunchKernelEx(&launch.config, Find(problem, choice.tile), p);
  if (error != cudaSuccess || division.parts == 1) return error;
  return LaunchReduceParts(problem, division, tile, p, stream);
}

}  // namespace jaxlowbit
