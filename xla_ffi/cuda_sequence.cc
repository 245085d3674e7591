// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers of a call (call.h): a sequence of steps. Every kernel but the first of the call uses PDL, which
// survives graph capture only within one handler (cuda/kernels/launch_config.h): a call never writes weights, and
// results of earlier calls are complete when its first kernel starts. Execute only enqueues, so XLA may capture it.
//
// XLA instantiates the calls of a program one after the other when the program is compiled or loaded. Instantiate
// starts to compile kernels without waiting, so that the kernels of all calls compile concurrently.
//
// Attribute `epsilon`, f32: for the normalize steps. Attribute `devices`, s64[]: CUDA ordinals of the devices that
// share a decode step; each has some of the heads and hidden features, and normalizations add float32 parts over the
// devices (cuda/ops/exchange.h). Absent for one device.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/limits.h"
#include "cuda/ops/attend.h"
#include "cuda/ops/exchange.h"
#include "cuda/ops/quantize_rows.h"
#include "cuda/ops/rms_norm.h"
#include "xla_ffi/attend_operands.h"
#include "xla_ffi/call.h"
#include "xla_ffi/cuda_enqueue.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

std::atomic<int64_t> execute_count{0};

std::vector<int64_t> PlacesRead(const Call& call, const Step& step) {
  std::vector<int64_t> places;
  switch (step.kind) {
    case StepKind::kMultiply:
      for (int64_t i = step.first; i < step.first + step.count; ++i) {
        const Places& at = call.products[i].places;
        for (int64_t place : {at.lhs, at.packed, at.scale, at.zero, at.unit, at.index,
                              at.group_sizes, at.group_offset, at.permutation, at.bias, at.residual, at.lhs_scale}) {
          if (place != 0) places.push_back(place);
        }
      }
      break;
    case StepKind::kRound:
    case StepKind::kNormalize:
      for (int64_t place : {step.x, step.addend, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      break;
    case StepKind::kAttend:  // checks its own buffers
      break;
  }
  return places;
}

std::vector<int64_t> PlacesWritten(const Call& call, const Step& step) {
  std::vector<int64_t> places;
  if (step.kind == StepKind::kAttend) return places;
  if (step.kind != StepKind::kMultiply) {
    places = {step.total, step.out, step.out_scale};
  } else {
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      places.push_back(call.products[i].places.out);
    }
  }
  places.erase(std::remove(places.begin(), places.end(), 0), places.end());
  return places;
}

class Sequence {
 public:
  Sequence(Call* call, Stage stage) : call_(*call), place_(stage) {}

  ffi::Error Run(cudaStream_t stream) {
    ffi::Error error = FindWorkspace();
    if (error.success()) error = place_.Find(stream);
    if (error.success()) error = CheckSteps();
    if (error.failure() || IsEmpty()) return error;
    error = FindDevices();
    if (error.failure()) return error;
    Placement placement(workspace_.data, workspace_.bytes, stream);
    if (Executes()) error = RedirectResults(&placement);
    workspace_ = {placement.workspace(), placement.bytes()};
    for (size_t i = 0; error.success() && i < call_.steps.size(); ++i) error = RunStep(i);
    const ffi::Error finished = ToError(placement.Finish(), "copying results of a call");
    return error.failure() ? error : finished;
  }

 private:
  bool Executes() const { return place_.stage == Stage::kExecute; }

  bool IsEmpty() const {
    return !call_.operands.empty() &&
           std::all_of(call_.operands.begin(), call_.operands.end(), [](const Operands& product) {
             return product.problem.batch == 0 || product.problem.m == 0;
           });
  }

  ffi::Error FindWorkspace() {
    const auto last = -static_cast<int64_t>(call_.rets().size());
    if (last == 0)
      return InvalidArgument("the call has no results but the last one must be its workspace.");
    const ffi::AnyBuffer workspace = call_.At(last);
    workspace_ = {workspace.untyped_data(), static_cast<int64_t>(workspace.element_count())};
    return CheckType("the last result, the workspace,", workspace, ffi::DataType::U8);
  }

  // Checks that the kernels support all products, before anything is launched.
  ffi::Error CheckSteps() {
    for (const Operands& product : call_.operands) {
      const auto& [p, b] = product;
      if (!Is8Bit(p.lhs) && !p.apply_lhs_scale) {
        const ffi::Error error = CheckSupported(p, place_.device);
        if (error.failure()) return error;
        continue;
      }
      const Kernel kernel = p.apply_lhs_scale ? Kernel::kQmmSm90Stream : Kernel::kQmmSm90;
      const Support support = SupportsCached(kernel, p, DeviceInfo(place_.device));
      if (!support) return InvalidArgument(support.reason + "; use another backend.");
      // No other kernel supports quantized activations with unaligned weights.
      if (Executes() && !(IsAligned(b.packed) && IsAligned(b.scale) && IsAligned(b.zero))) {
        return InvalidArgument(
            "weights of quantized activations must begin at multiples of 16 bytes; put "
            "jax.lax.optimization_barrier around them.");
      }
    }
    for (const Step& step : call_.steps) {
      const ffi::Error error = step.kind == StepKind::kNormalize ? CheckNormalize(step)
                               : step.kind == StepKind::kRound   ? CheckRound(step)
                                                                 : ffi::Error::Success();
      if (error.failure()) return error;
    }
    epsilon_ = call_.attributes.Find<float>("epsilon").value_or(0);
    return ffi::Error::Success();
  }

  ffi::Error CheckNormalize(const Step& step) const {
    if (step.x == 0 || step.total == 0) return InvalidArgument("a normalization has no rows.");
    const ffi::AnyBuffer x = call_.At(step.x);
    const ffi::DataType type = x.element_type();
    const auto elements = static_cast<int64_t>(x.element_count());
    const auto has_type = [&](const char* name, int64_t place, bool wide) {
      const ffi::AnyBuffer buffer = call_.At(place);
      return CheckType(
          name, buffer,
          buffer.element_type() == type || (wide && buffer.element_type() == ffi::DataType::F32),
          wide ? "f32 or the type of the rows" : "the type of the rows");
    };
    ffi::Error error = CheckType("rows", x, FloatType(type).has_value(), "f32, bf16 or f16");
    if (error.success()) error = CheckRank("rows", x, 3, "[1, m, columns]");
    if (error.failure()) return error;
    const int64_t columns = x.dimensions()[2];
    if (columns % 8 != 0 || columns > kMaxRmsNormColumns) {
      return InvalidArgument("rows are normalized that have " + std::to_string(columns) +
                             " elements, but it must be a multiple of 8 up to " +
                             std::to_string(kMaxRmsNormColumns) + ".");
    }
    error = has_type("sum", step.total, false);
    if (error.success()) error = CheckCount("sum", call_.At(step.total), elements, "the rows'");
    if (error.success() && step.addend != 0) {
      error = has_type("addend", step.addend, true);
      if (error.success()) {
        error = CheckCount("addend", call_.At(step.addend), elements, "the rows'");
      }
    }
    if (error.failure() || step.scales == 0) return error;
    if (step.out == 0) return InvalidArgument("a normalization with scales has no result.");
    const ffi::AnyBuffer out = call_.At(step.out);
    error = has_type("norm", step.scales, true);
    if (error.success()) error = CheckShape("norm", call_.At(step.scales), {columns}, "[columns]");
    if (error.success()) error = CheckCount("normed", out, elements, "the rows'");
    if (error.failure() || step.out_scale == 0) {
      return error.failure() ? error : has_type("normed", step.out, false);
    }
    error = CheckType("normed", out, IsQuantized(out.element_type()), "s8 or f8e4m3fn");
    if (error.failure()) return error;
    return CheckCount("lhs_scale", call_.At(step.out_scale), elements / columns, "rows");
  }

  static bool IsQuantized(ffi::DataType type) {
    return type == ffi::DataType::S8 || type == ffi::DataType::F8E4M3FN;
  }

  ffi::Error CheckRound(const Step& step) const {
    if (step.x == 0 || step.out == 0 || step.out_scale == 0) {
      return InvalidArgument("a rounding has no rows or no results.");
    }
    const ffi::AnyBuffer x = call_.At(step.x), out = call_.At(step.out);
    const bool wide = call_.products[step.first].problem.apply_lhs_scale;
    ffi::Error error =
        CheckType("lhs", x, FloatType(x.element_type()).has_value(), "f32, bf16 or f16");
    if (error.success()) error = CheckRank("lhs", x, 3, "[batch, m, columns]");
    if (error.success()) error = CheckType("rounded lhs", out, TypeOf(RoundedType(step, wide)));
    if (error.failure()) return error;
    const auto shape = x.dimensions();
    const int64_t padded = CeilDiv(shape[2], kInterleavedColumns) * kInterleavedColumns;
    error = CheckShape("rounded lhs", out, {shape[0], shape[1], padded},
                       "[batch, m, the next multiple of 16 columns]");
    if (error.success() && step.scales != 0) {
      error = CheckType("factor", call_.At(step.scales), ffi::DataType::F32);
      if (error.success()) {
        error = CheckShape("factor", call_.At(step.scales), {shape[2]}, "[columns]");
      }
    }
    if (error.failure()) return error;
    const ffi::AnyBuffer scale = call_.At(step.out_scale);
    error = CheckType("lhs_scale", scale, ffi::DataType::F32);
    return error.failure() ? error
                           : CheckCount("lhs_scale", scale, shape[0] * shape[1], "batch * m");
  }

  static ElementType RoundedType(const Step& step, bool wide) {
    return wide ? ElementType::kBf16 : step.to;
  }

  // Sets up the memory for the rows that a group of devices adds.
  ffi::Error FindDevices() {
    const auto group = call_.attributes.Find<ffi::Span<const int64_t>>("devices");
    if (!group || group->size() < 2) return ffi::Error::Success();
    const QuantizedMatmul& p = call_.operands[0].problem;
    if (p.m > kMaxExchangeRows) {
      return InvalidArgument("a block on several devices has " + std::to_string(p.m) +
                             " rows but at most " + std::to_string(kMaxExchangeRows) +
                             " are possible.");
    }
    const std::vector<int> devices(group->begin(), group->end());
    return ToError(FindExchange(devices, place_.device, p.n, &exchange_),
                   "finding memory that " + std::to_string(devices.size()) + " devices share, as " +
                       Describe(p, place_.device) + ",");
  }

  // Redirects to the workspace each result that overlaps another result, or a buffer that the same or a later step
  // reads. (LaunchProducts does so for the products of one step.)
  ffi::Error RedirectResults(Placement* placement) {
    const auto& steps = call_.steps;
    if (steps.size() < 2) return ffi::Error::Success();
    std::vector<std::vector<int64_t>> read, written;
    for (const Step& step : steps) {
      read.push_back(PlacesRead(call_, step));
      written.push_back(PlacesWritten(call_, step));
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      for (int64_t place : written[i]) {
        if (!OverlapsOthers(place, i, read, written)) continue;
        const Extent extent = call_.ExtentAt(place);
        void* own = placement->Redirect(const_cast<void*>(extent.data), extent.bytes);
        if (own == nullptr) return CheckWorkspace(extent.bytes, placement->bytes());
        Move(place, own);
      }
    }
    return ffi::Error::Success();
  }

  bool OverlapsOthers(int64_t place, size_t step, const std::vector<std::vector<int64_t>>& read,
                      const std::vector<std::vector<int64_t>>& written) const {
    const Extent own = call_.ExtentAt(place);
    const auto overlaps = [&](int64_t other) {
      return other != place && Overlap(own, call_.ExtentAt(other));
    };
    const bool multiplies = call_.steps[step].kind == StepKind::kMultiply;
    for (size_t i = multiplies ? step + 1 : step; i < read.size(); ++i) {
      for (int64_t other : read[i]) {
        // Safe in place: the thread that overwrites an element also reads it.
        const bool in_place = i == step && call_.steps[step].kind == StepKind::kNormalize &&
                              place == call_.steps[step].total && call_.DataAt(other) == own.data &&
                              other == call_.steps[step].x;
        if (!in_place && overlaps(other)) return true;
      }
    }
    for (size_t i = 0; i < written.size(); ++i) {
      for (int64_t other : written[i]) {
        if (!(i == step && multiplies) && overlaps(other)) return true;
      }
    }
    return false;
  }

  // Replaces the memory of the buffer at a place.
  void Move(int64_t place, void* data) {
    moved_.push_back({place, data});
    for (size_t i = 0; i < call_.products.size(); ++i) {
      const Places& at = call_.products[i].places;
      Buffers& b = call_.operands[i].buffers;
      if (at.lhs == place) b.lhs = data;
      if (at.out == place) b.out = data;
      if (at.residual == place) b.residual = data;
      if (at.lhs_scale == place) b.lhs_scale = static_cast<const float*>(data);
    }
  }

  void* DataAt(int64_t place) const {
    for (const auto& [moved, data] : moved_) {
      if (moved == place) return data;
    }
    return call_.DataAt(place);
  }

  ffi::Error RunStep(size_t i) {
    const Step& step = call_.steps[i];
    switch (step.kind) {
      case StepKind::kMultiply:
        return Multiply(step);
      case StepKind::kRound:
        return Round(step, i);
      case StepKind::kNormalize:
        return Normalize(step);
      case StepKind::kAttend:
        return Attention();
    }
    return ffi::Error::Success();
  }

  ffi::Error Multiply(const Step& step) {
    const auto first = call_.operands.begin() + step.first;
    std::vector<Operands> products(first, first + step.count);
    for (Operands& product : products) product.problem.pdl = started_;
    started_ = true;
    return Enqueue(std::move(products), workspace_, place_);
  }

  ffi::Error Round(const Step& step, size_t i) {
    const ffi::AnyBuffer x = call_.At(step.x);
    Operands* product = &call_.operands[step.first];
    const bool follows = i + 1 < call_.steps.size() &&
                         call_.steps[i + 1].kind == StepKind::kMultiply && step.count == 1 &&
                         call_.steps[i + 1].first == step.first;
    if (follows && !started_ && FusesRounding(step, x, product)) return ffi::Error::Success();
    const QuantizeRows rows = {*FloatType(x.element_type()),
                               step.to,
                               x.dimensions()[0] * x.dimensions()[1],
                               x.dimensions()[2],
                               DataAt(step.x),
                               static_cast<const float*>(DataAt(step.scales)),
                               DataAt(step.out),
                               static_cast<float*>(DataAt(step.out_scale)),
                               started_,
                               started_ || product->problem.bits > 4,
                               product->problem.apply_lhs_scale};
    started_ = true;
    if (!Executes()) return ffi::Error::Success();
    return ToError(LaunchQuantizeRows(rows, place_.stream), "launching the rounding of rows");
  }

  // Lets the product round its rows itself, if a kernel supports it. Otherwise two kernels run, which read all floats
  // before any result is written, so in Execute the floats may be unaligned or overlap results.
  bool FusesRounding(const Step& step, const ffi::AnyBuffer& x, Operands* product) const {
    Operands own = *product;
    auto& [p, b] = own;
    if (!p.apply_lhs_scale || x.element_type() != ffi::DataType::BF16 || step.scales != 0 ||
        x.dimensions()[2] != p.k) {
      return false;
    }
    p.rounding = RoundingTo(step.to);
    b.lhs = x.untyped_data();
    b.lhs_scale = nullptr;
    if (Executes() && (!IsAligned(b.lhs) || Overlap(LhsExtent(p, b), OutExtent(p, b)))) {
      return false;
    }
    if (!SupportsCached(Kernel::kQmmSm90Stream, p, DeviceInfo(place_.device))) return false;
    *product = own;
    return true;
  }

  ffi::Error Normalize(const Step& step) {
    started_ = true;
    if (!Executes()) return ffi::Error::Success();
    const ffi::AnyBuffer x = call_.At(step.x);
    const auto type_at = [&](int64_t place) {
      return *FloatType(call_.At(place == 0 ? step.x : place).element_type());
    };
    RmsNorm norm = {type_at(step.x),
                    type_at(step.scales),
                    type_at(step.addend),
                    x.dimensions()[0] * x.dimensions()[1],
                    x.dimensions()[2],
                    DataAt(step.x),
                    DataAt(step.addend),
                    DataAt(step.scales),
                    DataAt(step.total),
                    DataAt(step.out),
                    epsilon_,
                    exchange_};
    if (step.out_scale != 0) {
      norm.out_type = call_.At(step.out).element_type() == ffi::DataType::S8 ? ElementType::kInt8
                                                                             : ElementType::kE4m3;
      norm.out_scale = static_cast<float*>(DataAt(step.out_scale));
    }
    return ToError(LaunchRmsNorm(norm, DeviceInfo(place_.device), place_.stream),
                   "launching the normalization");
  }

  ffi::Error Attention() {
    started_ = true;
    if (call_.args().size() < kAttendOperands || call_.rets().size() < kAttendResults) {
      return InvalidArgument("an attention has at least " + std::to_string(kAttendOperands) +
                             " operands and " + std::to_string(kAttendResults) + " results.");
    }
    const AttendBuffers buffers(call_.args(), call_.rets());
    Attend attend;
    ffi::Error error = DecodeAttend(buffers, &call_.attributes, &attend);
    if (error.success()) error = call_.attributes.Missing();
    // Only Execute is sure to get the final buffers.
    if (error.success() && Executes()) error = CheckNoOverlap(buffers);
    if (error.failure()) return error;
    const Device& device = DeviceInfo(place_.device);
    const std::string what = "attention of " + std::to_string(attend.batch) +
                             " queries on CUDA device " + std::to_string(place_.device);
    if (!Executes()) return ToError(LoadAttend(attend, device), "loading " + what);
    return ToError(LaunchAttend(attend, workspace_.data, workspace_.bytes, device, place_.stream),
                   "launching " + what);
  }

  Call& call_;
  Place place_;
  Workspace workspace_ = {nullptr, 0};
  Exchange exchange_;
  float epsilon_ = 0;
  bool started_ = false;  // a kernel of the call has been launched
  std::vector<std::pair<int64_t, void*>> moved_;
};

template <Stage kStage>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary dictionary) {
  if (kStage == Stage::kExecute) execute_count.fetch_add(1, std::memory_order_relaxed);
  Call call(args, rets, dictionary);
  return Guard(call.attributes.caller(), [&] {
    const ffi::Error error = call.Decode();
    return error.failure() ? error : Sequence(&call, kStage).Run(stream);
  });
}

// Ignores errors, which Initialize reports.
ffi::Error Instantiate(ffi::Dictionary dictionary) {
  const ffi::Error ignored = Guard("jaxlowbit", [&] {
    std::vector<Product> products;
    std::vector<Step> steps;
    const ffi::Error error = Attributes(dictionary).Decode(&products, &steps);
    if (error.failure()) return error;
    for (const Step& step : steps) {
      if (step.kind == StepKind::kRound && products[step.first].problem.apply_lhs_scale &&
          step.scales == 0) {
        products[step.first].problem.rounding = RoundingTo(step.to);
      }
      if (step.kind != StepKind::kMultiply) continue;
      std::vector<QuantizedMatmul> problems;
      for (int64_t i = step.first; i < step.first + step.count; ++i) {
        const QuantizedMatmul& p = products[i].problem;
        if (p.batch < 1 || p.m < 1 || p.num_weights < 1) return ffi::Error::Success();
        problems.push_back(p);
        problems.back().pdl = &step != &steps.front() && p.rounding == Rounding::kNone;
      }
      StartCompiling(problems);
    }
    return ffi::Error::Success();
  });
  static_cast<void>(ignored);
  return ffi::Error::Success();
}

template <ffi::ExecutionStage kStage>
auto Bind() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

int64_t CudaExecuteCount() { return execute_count.load(std::memory_order_relaxed); }

}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxlowbitCudaInstantiate, jaxlowbit::Instantiate,
    xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInstantiate>().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaInitialize,
                              jaxlowbit::Run<jaxlowbit::Stage::kInitialize>,
                              jaxlowbit::Bind<xla::ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCudaExecute, jaxlowbit::Run<jaxlowbit::Stage::kExecute>,
                              jaxlowbit::Bind<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
