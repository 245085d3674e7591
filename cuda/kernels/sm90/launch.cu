// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

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
Form TmaFormOf(const Epilogue& epilogue) {
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
    default:
      return Form::kOther;
  }
}

// All parameters but the pointers and tensor maps.
Params ParamsOf(const PlannedStep& step, const StreamK& schedule) {
  const QuantizedMatmul& problem = step.problem;
  const Addresses& buffers = step.products.front().buffers;
  const Choice& choice = step.choice;
  const TileShape& tile = kTiles[choice.tile];
  Params p = {};
  p.out_float = problem.out == ElementType::kF32;
  p.out_integers = problem.is_integer_matmul();
  p.aligned = problem.out == problem.floats() && SupportsTma(problem.n) && step.out_aligned;
  p.epilogue = EpilogueOf(problem, buffers);
  p.table = TableOf(problem, buffers);
  p.units = UnitsOf(problem);
  const bool loads_residual = buffers.residual != nullptr &&
                              problem.epilogue.residual == problem.floats() &&
                              !problem.epilogue.gated && step.residual_aligned;
  const bool has_residual = buffers.residual != nullptr;
  if (p.aligned && (loads_residual || !has_residual)) {
    p.form = TmaFormOf(problem.epilogue);
  } else if (p.out_float && !has_residual && TmaFormOf(problem.epilogue) == Form::kSum) {
    p.form = Form::kFloat;
  } else {
    p.form = Form::kOther;
  }
  p.residual_by_tma = loads_residual && p.form != Form::kOther;
  p.num_weights = problem.num_weights;
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.plan = PlanOf(problem, tile);
  p.ahead_stages = problem.pdl && !problem.is_ragged() ? p.plan.num_stages : 0;
  p.lhs_rows = tile.m / choice.peers;
  p.lhs_in_atoms = choice.peers == 1 && problem.k % kAtom == 0 && !Is8Bit(problem.lhs);
  // Swizzled tiles are multiples of 8 rows.
  p.last_rows =
      problem.is_ragged() ? 0 : static_cast<int>(CeilDiv(p.m % tile.m, 8 * choice.peers)) * 8;
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
  p.ragged = RaggedOf(problem, tile.m, p.tiles_n);
  return p;
}

// The tensor maps of a launch without their pointers; those without axes are not used.
struct Shapes {
  TensorShape lhs, last_lhs, packed, scales, zeros, out, residual;
};

Shapes ShapesOf(const QuantizedMatmul& problem, bool zeros, const TileShape& tile,
                const Params& p) {
  Shapes shapes;
  const int64_t k_blocks = p.lhs_in_atoms ? problem.k_blocks() : 1;
  // Tensor maps have 16-bit elements: two 8-bit columns are one element.
  const Matrices lhs = {problem.batch, k_blocks, problem.m, problem.k * SizeOf(problem.lhs) / 2};
  shapes.lhs =
      ShapeOfBlocks(problem.floats(), lhs, p.lhs_rows, p.lhs_in_atoms ? tile.stage_atoms : 1);
  if (p.last_rows > 0) shapes.last_lhs = ShapeOfBlocks(problem.floats(), lhs, p.last_rows, 1);
  constexpr int64_t kRowBytes = 128;
  const int64_t atom_rows = problem.words_per_atom() * 4 / kRowBytes;
  const int64_t strips = problem.num_weights * problem.n_blocks();
  const int together = p.epilogue.gated ? 1 : tile.cta_strips();
  shapes.packed = ShapeOfRows({strips, problem.k_blocks() * atom_rows, kRowBytes},
                              static_cast<int>(tile.stage_atoms * atom_rows), together,
                              problem.bits % 4 == 0);  // swizzled: device/packed.cuh
  const auto of_groups = [&](int64_t bytes) {
    return ShapeOfRows({strips, problem.groups(), kAtom * bytes}, p.plan.stage_groups, together,
                       false);
  };
  shapes.scales = of_groups(problem.scale_bytes());
  if (zeros) shapes.zeros = of_groups(problem.zero_bytes());
  if (!p.aligned) return shapes;
  const bool halves = p.form == Form::kSigmoid && p.epilogue.gated && tile.strips == 1;
  const int rows = halves ? GatedStoreRows(tile) : StoreRows(tile);
  shapes.out = ShapeOfMatrices(problem.out, problem.batch, problem.m, problem.n, rows);
  if (p.residual_by_tma) shapes.residual = shapes.out;
  return shapes;
}

// Tasks of the launch, or more of a ragged product.
int64_t TasksOf(const QuantizedMatmul& problem, const TileShape& tile, const StreamK& schedule,
                int tiles_n) {
  return problem.is_ragged() ? MaxBlocks(problem, tile.m) * tiles_n : schedule.tasks();
}

class Sm90Launch final : public KernelLaunch {
 public:
  Sm90Launch(const PlannedStep& step, const Device& device, const void* function)
      : problem_(step.problem),
        tile_(kTiles[step.choice.tile]),
        peers_(step.choice.peers),
        function_(function),
        schedule_(StreamKOf(problem_, tile_, peers_, step.choice.split_k, device.num_sms)),
        params_(ParamsOf(step, schedule_)),
        shapes_(ShapesOf(problem_, step.products.front().buffers.zero != nullptr, tile_, params_)),
        grid_(static_cast<unsigned>(
            std::min(TasksOf(problem_, tile_, schedule_, params_.tiles_n), schedule_.resident) *
            peers_)),
        threads_(tile_.threads()),
        shared_bytes_(params_.plan.shared_bytes()),
        num_sms_(device.num_sms) {}

  cudaError_t Launch(const Buffers* products, cudaStream_t stream) const override {
    const Buffers& b = *products;
    Params p = params_;
    p.scale = b.scale;
    p.index = b.index;
    p.out_data = b.out;
    p.lhs_scale = b.lhs_scale;
    p.epilogue.bias = b.bias;
    p.epilogue.residual = b.residual;
    p.units.data = b.unit;
    p.units.index = b.index;
    p.partial_sums = static_cast<float*>(b.workspace);
    p.ragged.sizes = b.group_sizes;
    p.ragged.offset = b.group_offset;
    cudaError_t error = Encode(shapes_.lhs, b.lhs, &p.lhs);
    if (error == cudaSuccess) error = Encode(shapes_.last_lhs, b.lhs, &p.last_lhs);
    if (error == cudaSuccess) error = Encode(shapes_.packed, b.packed, &p.packed);
    if (error == cudaSuccess) error = Encode(shapes_.scales, b.scale, &p.scales);
    if (error == cudaSuccess) error = Encode(shapes_.zeros, b.zero, &p.zeros);
    if (error == cudaSuccess) error = Encode(shapes_.out, b.out, &p.out);
    if (error == cudaSuccess) error = Encode(shapes_.residual, b.residual, &p.residual);
    if (error != cudaSuccess) return error;
    const LaunchConfig config(grid_, threads_, shared_bytes_, stream, problem_.pdl, peers_);
    error = LaunchFunction(config, function_, &p);
    if (error != cudaSuccess || schedule_.splits == 1) return error;
    return Reduce(p, stream);
  }

 private:
  // Adds the partial sums of the stream-K tail.
  cudaError_t Reduce(const Params& p, cudaStream_t stream) const {
    const dim3 grid(static_cast<unsigned>(tile_.m / 8),
                    static_cast<unsigned>(tile_.cta_strips() / problem_.weights_per_element()),
                    static_cast<unsigned>(schedule_.tail_tiles));
    // So much shared memory that every multiprocessor gets the same number of CTAs. They start while CTAs of the kernel
    // before are ending, and would fill the first multiprocessors that are free.
    const int64_t ctas = CeilDiv(int64_t{grid.x} * grid.y * grid.z, num_sms_);
    const int shared_bytes =
        ctas < kMaxReduceCtas ? Sm90SharedBytes(static_cast<int>(ctas)) - kReduceSharedBytes : 0;
    const LaunchConfig config(grid, kReduceThreads, shared_bytes, stream, true);
    const auto kernel = problem_.floats() == ElementType::kBf16 ? ReduceTailKernel<__nv_bfloat16>
                                                                : ReduceTailKernel<__half>;
    return cudaLaunchKernelEx(&config.config, kernel, p, tile_.cta_strips(), tile_.m);
  }

  const QuantizedMatmul problem_;
  const TileShape tile_;
  const int peers_;
  const void* const function_;
  const StreamK schedule_;
  const Params params_;
  const Shapes shapes_;
  const dim3 grid_;
  const int threads_, shared_bytes_, num_sms_;
};

}  // namespace

cudaError_t Load(const InstanceKey& key, const void* function) {
  return AllowSharedMemory(function, Sm90SharedBytes(kTiles[TileOf(key)].ctas_per_sm));
}

cudaError_t Prepare(Device& device) {
  cudaError_t error = InitializeTensorMaps();
  for (const auto kernel : {ReduceTailKernel<__nv_bfloat16>, ReduceTailKernel<__half>}) {
    if (error != cudaSuccess) break;
    error = AllowSharedMemory(reinterpret_cast<const void*>(kernel),
                              Sm90SharedBytes(1) - kReduceSharedBytes);
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

cudaError_t Load(const PlannedStep& step, const Device& device,
                 std::unique_ptr<const KernelLaunch>* launch) {
  const void* function = nullptr;
  const cudaError_t error = KernelOn(device, KeyOf(step.problem, step.choice.tile), &function);
  if (error == cudaSuccess) *launch = std::make_unique<Sm90Launch>(step, device, function);
  return error;
}

}  // namespace jaxlowbit::sm90
