// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "cuda/extents.h"
#include "cuda/kernels/launch_config.h"
#include "cuda/kernels/loaded.h"
#include "cuda/kernels/params.h"
#include "cuda/kernels/sm90/instances.h"
#include "cuda/kernels/sm90/launch.h"
#include "cuda/kernels/sm90/params.cuh"
#include "cuda/kernels/sm90/reduce.cuh"
#include "cuda/kernels/tensor_map.h"
#include "cuda/select/ragged.h"

namespace jaxlowbit::sm90 {
namespace {

// The form of an epilogue with results stored by TMA.
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
                const StreamK& schedule) {
  const TileShape& tile = kTiles[choice.tile];
  Params p;
  p.scale = buffers.scale;
  p.index = buffers.index;
  p.out_data = buffers.out;
  p.out_float = problem.out == ElementType::kF32;
  p.out_integers = problem.is_integer_matmul();
  p.aligned = problem.out == problem.floats() && SupportsTma(problem.n) && IsAligned(buffers.out);
  p.epilogue = EpilogueOf(problem, buffers);
  p.table = TableOf(problem, buffers);
  p.lhs_scale = buffers.lhs_scale;
  p.units = UnitsOf(problem, buffers);
  const bool loads_residual = buffers.residual != nullptr &&
                              problem.epilogue.residual == problem.floats() &&
                              !problem.epilogue.gated && IsAligned(buffers.residual);
  p.form = p.aligned && (loads_residual || buffers.residual == nullptr) ? FormOf(problem.epilogue)
                                                                        : Form::kOther;
  p.residual_by_tma = loads_residual && p.form != Form::kOther;
  p.num_weights = problem.num_weights;
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.plan = PlanOf(problem, tile);
  p.ahead_stages = problem.pdl && !problem.is_ragged() ? p.plan.num_stages : 0;
  p.lhs_rows = tile.m / choice.peers;
  p.lhs_in_atoms = choice.peers == 1 && problem.k % kAtom == 0 && !Is8Bit(problem.lhs);
  // Swizzled tiles are multiples of 8 rows.
  p.last_rows = problem.is_ragged()
                    ? 0
                    : static_cast<int>(CeilDiv(p.m % tile.m, 8 * choice.peers)) * 8;
  p.group_bytes = p.plan.bytes.scales + p.plan.bytes.zeros;
  p.n_blocks = static_cast<int>(problem.n_blocks());
  p.strips = static_cast<int>(problem.strips());
  p.k_blocks = static_cast<int>(problem.k_blocks());
  p.groups = static_cast<int>(problem.groups());
  p.atoms_per_group = AtomsPerGroup(problem);
  p.groups_per_atom = GroupsPerAtom(problem);
  const int64_t tiles_m = CeilDiv(problem.m, tile.m);
  p.tiles_n = static_cast<int>(CeilDiv(p.strips, tile.cta_strips() * choice.peers));
  p.batch_tiles = WideDivideBy(tiles_m * p.tiles_n);
  p.band_tiles = WideDivideBy(tiles_m * kBand);
  p.last_width = WideDivideBy(p.tiles_n % kBand == 0 ? kBand : p.tiles_n % kBand);
  p.peer_shift = choice.peers - 1;
  p.whole_tiles = static_cast<int>(schedule.whole_tiles);
  p.splits = schedule.splits;
  p.num_tasks = static_cast<int>(schedule.tasks());
  p.partial_sums = static_cast<float*>(buffers.workspace);
  p.ragged = RaggedOf(problem, buffers);
  p.column_tiles = WideDivideBy(p.tiles_n);
  return p;
}

cudaError_t DescribeOperands(const QuantizedMatmul& problem, const Buffers& buffers,
                             const TileShape& tile, Params& p) {
  const int64_t k_blocks = p.lhs_in_atoms ? problem.k_blocks() : 1;
  // Tensor maps have 16-bit elements: two 8-bit columns are one element.
  const Matrices lhs = {problem.batch, k_blocks, problem.m, problem.k * SizeOf(problem.lhs) / 2};
  cudaError_t error = DescribeBlocks(buffers.lhs, problem.floats(), lhs, p.lhs_rows,
                                     p.lhs_in_atoms ? tile.stage_atoms : 1, &p.lhs);
  if (error == cudaSuccess && p.last_rows > 0) {
    error = DescribeBlocks(buffers.lhs, problem.floats(), lhs, p.last_rows, 1, &p.last_lhs);
  }
  if (error != cudaSuccess) return error;
  constexpr int64_t kRowBytes = 128;
  const int64_t atom_rows = problem.words_per_atom() * 4 / kRowBytes;
  const int64_t strips = problem.num_weights * problem.n_blocks();
  const int together = p.epilogue.gated ? 1 : tile.cta_strips();
  error = DescribeRows(buffers.packed, {strips, problem.k_blocks() * atom_rows, kRowBytes},
                       static_cast<int>(tile.stage_atoms * atom_rows), together,
                       problem.bits % 4 == 0, &p.packed);  // swizzled: device/packed.cuh
  const auto describe_groups = [&](const void* groups, int64_t bytes, CUtensorMap* map) {
    return DescribeRows(groups, {strips, problem.groups(), kAtom * bytes}, p.plan.stage_groups,
                        together, false, map);
  };
  if (error == cudaSuccess)
    error = describe_groups(buffers.scale, problem.scale_bytes(), &p.scales);
  if (error == cudaSuccess && buffers.zero != nullptr) {
    error = describe_groups(buffers.zero, problem.zero_bytes(), &p.zeros);
  }
  if (error != cudaSuccess || !p.aligned) return error;
  const bool halves = p.form == Form::kSigmoid && p.epilogue.gated && tile.strips == 1;
  const int rows = halves ? GatedStoreRows(tile) : StoreRows(tile);
  error =
      DescribeMatrices(buffers.out, problem.out, problem.batch, problem.m, problem.n, rows, &p.out);
  if (error != cudaSuccess || !p.residual_by_tma) return error;
  return DescribeMatrices(buffers.residual, problem.out, problem.batch, problem.m, problem.n, rows,
                          &p.residual);
}

}  // namespace

cudaError_t Load(const InstanceKey& key, const void* function) {
  return AllowSharedMemory(function, Sm90SharedBytes(kTiles[TileOf(key)].ctas_per_sm));
}

cudaError_t Prepare(Device& device) {
  cudaError_t error = InitializeTensorMaps();
  for (const auto kernel : {ReduceTailKernel<__nv_bfloat16>, ReduceTailKernel<__half>}) {
    if (error == cudaSuccess) error = jaxlowbit::Load(reinterpret_cast<const void*>(kernel));
  }
  for (int ctas_per_sm : {1, 2}) {
    // Any kernel with this number of CTAs per SM gives the same answer.
    const auto found =
        std::find_if(std::begin(kTiles), std::end(kTiles),
                     [&](const TileShape& tile) { return tile.ctas_per_sm == ctas_per_sm; });
    const int number = static_cast<int>(found - std::begin(kTiles));
    const void* function = nullptr;
    if (error == cudaSuccess) error = KernelOn(device, KeyOf(QuantizedMatmul{}, number), &function);
    for (int cluster_ctas : {1, 2, 4}) {
      if (error != cudaSuccess) break;
      const LaunchConfig launch(cluster_ctas, found->threads(), Sm90SharedBytes(ctas_per_sm),
                                nullptr, false, cluster_ctas);
      error = cudaOccupancyMaxActiveClusters(&device.clusters[ctas_per_sm][cluster_ctas], function,
                                             &launch.config);
    }
  }
  return error;
}

cudaError_t Launch(const QuantizedMatmul& problem, const Buffers& buffers, const Choice& choice,
                   const Device& device, cudaStream_t stream) {
  const void* function = nullptr;
  cudaError_t error = KernelOn(device, KeyOf(problem, choice.tile), &function);
  if (error != cudaSuccess) return error;
  const TileShape& tile = kTiles[choice.tile];
  const StreamK schedule = StreamKOf(problem, tile, choice.peers, choice.split_k, device.num_sms);
  Params p = ParamsOf(problem, buffers, choice, schedule);
  error = DescribeOperands(problem, buffers, tile, p);
  if (error != cudaSuccess) return error;
  const int64_t tasks = problem.is_ragged() ? MaxBlocks(problem, tile.m) * p.tiles_n  // or fewer
                                            : schedule.tasks();
  const int64_t clusters = std::min(tasks, schedule.resident);
  const LaunchConfig launch(clusters * choice.peers, tile.threads(), p.plan.shared_bytes(), stream,
                            problem.pdl, choice.peers);
  error = LaunchFunction(launch, function, &p);
  if (error != cudaSuccess || schedule.splits == 1) return error;
  const dim3 grid(static_cast<unsigned>(tile.m / 8),
                  static_cast<unsigned>(tile.cta_strips() / problem.weights_per_element()),
                  static_cast<unsigned>(schedule.tail_tiles));
  const LaunchConfig reduce(grid, kReduceThreads, 0, stream, true);
  const auto kernel = problem.floats() == ElementType::kBf16 ? ReduceTailKernel<__nv_bfloat16>
                                                             : ReduceTailKernel<__half>;
  return cudaLaunchKernelEx(&reduce.config, kernel, p, tile.cta_strips(), tile.m);
}

}  // namespace jaxlowbit::sm90
