// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cuda_plan.h"

#include <algorithm>
#include <utility>

#include "cuda/kernels/loaded.h"
#include "cuda/limits.h"
#include "cuda/ops/attend.h"
#include "cuda/ops/exchange.h"
#include "cuda/ops/quantize_rows.h"
#include "cuda/ops/rms_norm.h"
#include "cuda/select/select.h"
#include "xla_ffi/attend_operands.h"
#include "xla_ffi/cuda_error.h"
#include "xla_ffi/cuda_experts.h"

namespace jaxlowbit {
namespace {

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

// The addresses of a normalization, in the order of the step's fields.
struct NormAddresses {
  Address x, addend, scales, total, out, out_scale;
};

class NormalizeStep final : public LoadedStep {
 public:
  // The pointers of `norm` are not set.
  NormalizeStep(const RmsNorm& norm, const NormAddresses& addresses, const Device& device)
      : norm_(norm), at_(addresses), device_(device) {}

  cudaError_t Run(void* const* pointers, cudaStream_t stream) const override {
    RmsNorm norm = norm_;
    norm.x = PointerTo(at_.x, pointers);
    norm.addend = PointerTo(at_.addend, pointers);
    norm.scale = PointerTo(at_.scales, pointers);
    norm.sum = PointerTo(at_.total, pointers);
    norm.out = PointerTo(at_.out, pointers);
    norm.out_scale = static_cast<float*>(PointerTo(at_.out_scale, pointers));
    return LaunchRmsNorm(norm, device_, stream);
  }

 private:
  const RmsNorm norm_;
  const NormAddresses at_;
  const Device& device_;
};

std::string NameOfCapability(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

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

class Sequence {
 public:
  Sequence(Call* call, const Target& target, Ways* ways, LoadedCall* loaded)
      : call_(*call),
        target_(target),
        ways_(*ways),
        loaded_(*loaded),
        settled_(!call->attributes.Find<bool>("follows").value_or(false)),
        started_(!settled_) {}

  ffi::Error Run() {
    ffi::Error error = FindWorkspace();
    if (error.success()) error = CheckSteps();
    if (error.failure() || IsEmpty()) return error;
    error = FindList();
    if (error.success()) error = FindDevices();
    std::vector<PlannedStep> results;
    if (error.success()) error = RedirectResults(&results);
    if (error.failure()) return error;
    for (size_t i = 0; i < call_.products.size(); ++i) {
      products_.push_back(Locate(call_.products[i].places, call_.operands[i]));
    }
    if (listed_ != nullptr) ListRows();
    for (size_t i = 0; error.success() && i < call_.steps.size(); ++i) error = PlanStep(i);
    return error.failure() ? error : Load(results, "copying ", "results of a call");
  }

 private:
  int ordinal() const { return target_.device->ordinal; }

  bool IsEmpty() const {
    return !call_.operands.empty() &&
           std::all_of(call_.operands.begin(), call_.operands.end(), [](const Operands& product) {
             return product.problem.batch == 0 || product.problem.m == 0;
           });
  }

  // The address of a buffer, which may have been redirected.
  Address AddressAt(int64_t place) const {
    for (const auto& [moved, address] : moved_) {
      if (moved == place) return address;
    }
    return call_.AddressAt(place);
  }

  // The extent of a buffer before results are redirected.
  AddressExtent ExtentAt(int64_t place) const {
    return {call_.AddressAt(place), call_.ExtentAt(place).bytes};
  }

  PlannedProduct Locate(const Places& at, const Operands& operands) const {
    PlannedProduct product = {operands.problem, {}};
    product.buffers.codebook = operands.buffers.codebook;
#define JAXLOWBIT_PLACE(name) product.buffers.name = AddressAt(at.name);
#include "xla_ffi/call.def"
    return product;
  }

  ffi::Error FindWorkspace() {
    const auto last = -static_cast<int64_t>(call_.rets().size());
    if (last == 0)
      return InvalidArgument("the call has no results but the last one must be its workspace.");
    const ffi::AnyBuffer workspace = call_.At(last);
    room_ = {call_.AddressAt(last), static_cast<int64_t>(workspace.element_count())};
    return CheckType("the last result, the workspace,", workspace, ffi::DataType::U8);
  }

  // Checks that the kernels support all products, before anything is launched.
  ffi::Error CheckSteps() {
    for (size_t i = 0; i < call_.operands.size(); ++i) {
      const QuantizedMatmul& p = call_.operands[i].problem;
      const bool quantized = Is8Bit(p.lhs) || p.apply_lhs_scale;
      const Kernel kernel = p.apply_lhs_scale ? Kernel::kQmmSm90Stream : Kernel::kQmmSm90;
      const Support support =
          quantized ? Supports(kernel, p, *target_.device) : Supports(p, *target_.device);
      if (!support) return InvalidArgument(support.reason + "; use another backend.");
      // No other kernel supports quantized activations with unaligned weights.
      const Places& at = call_.products[i].places;
      for (int64_t place : {at.packed, at.scale, at.zero}) {
        if (quantized && !ways_.IsAligned(AddressAt(place))) {
          return InvalidArgument(
              "weights of quantized activations must begin at multiples of 16 bytes; put "
              "jax.lax.optimization_barrier around them.");
        }
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
    if (step.addend == 0 || step.total == 0) {
      return InvalidArgument("a normalization has no addend or no sum.");
    }
    const ffi::AnyBuffer total = call_.At(step.total);
    const ffi::DataType type = total.element_type();
    const auto elements = static_cast<int64_t>(total.element_count());
    const auto has_type = [&](const char* name, int64_t place, bool wide) {
      const ffi::AnyBuffer buffer = call_.At(place);
      return CheckType(
          name, buffer,
          buffer.element_type() == type || (wide && buffer.element_type() == ffi::DataType::F32),
          wide ? "f32 or the type of the sum" : "the type of the sum");
    };
    ffi::Error error = CheckType("sum", total, FloatType(type).has_value(), "f32, bf16 or f16");
    if (error.success()) error = CheckRank("sum", total, 3, "[1, m, columns]");
    if (error.failure()) return error;
    const int64_t columns = total.dimensions()[2];
    if (columns % 8 != 0 || columns > kMaxRmsNormColumns) {
      return InvalidArgument("rows are normalized that have " + std::to_string(columns) +
                             " elements, but it must be a multiple of 8 up to " +
                             std::to_string(kMaxRmsNormColumns) + ".");
    }
    if (step.x != 0) {
      error = has_type("rows", step.x, false);
      if (error.success()) error = CheckCount("rows", call_.At(step.x), elements, "the sum's");
    }
    if (error.success()) error = has_type("addend", step.addend, true);
    if (error.success()) {
      error = CheckCount("addend", call_.At(step.addend), elements, "the sum's");
    }
    if (error.failure() || step.scales == 0) return error;
    if (step.out == 0) return InvalidArgument("a normalization with scales has no result.");
    const ffi::AnyBuffer out = call_.At(step.out);
    error = has_type("norm", step.scales, true);
    if (error.success()) error = CheckShape("norm", call_.At(step.scales), {columns}, "[columns]");
    if (error.success()) error = CheckCount("normed", out, elements, "the sum's");
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
    const auto normalizes = [](const Step& step) { return step.kind == StepKind::kNormalize; };
    const auto step = std::find_if(call_.steps.begin(), call_.steps.end(), normalizes);
    if (step == call_.steps.end()) return ffi::Error::Success();
    const auto shape = call_.At(step->total).dimensions();
    const int64_t rows = shape[0] * shape[1], columns = shape[2];
    if (rows > kMaxExchangeRows) {
      return InvalidArgument("several devices add " + std::to_string(rows) + " rows but at most " +
                             std::to_string(kMaxExchangeRows) + " are possible.");
    }
    loaded_.exchanges = true;
    const std::vector<int> devices(group->begin(), group->end());
    return ToError(FindExchange(devices, ordinal(), columns, &exchange_),
                   "finding memory that " + std::to_string(devices.size()) + " devices share for " +
                       std::to_string(rows) + " rows of " + std::to_string(columns) +
                       " on CUDA device " + std::to_string(ordinal()));
  }

  // Checks groupings of choices, and finds one that the products do better without. As the first step of a call, it has
  // operands that are older than the call. Behind a router, the first product waits for its choices, and so do the
  // kernels behind that product.
  ffi::Error FindList() {
    for (const Step& step : call_.steps) {
      if (step.kind != StepKind::kGroup) continue;
      const ffi::Error error = CheckGroup(call_, step);
      if (error.failure()) return error;
      const bool first = &step == call_.steps.data();
      const bool routed = !first && (&step)[-1].kind == StepKind::kRoute;
      if ((routed || (first && !started_)) && PrefersList(step)) listed_ = &step;
    }
    return ffi::Error::Success();
  }

  bool PrefersList(const Step& step) {
    std::vector<QuantizedMatmul> products;
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      products.push_back(call_.operands[i].problem);
    }
    if (!jaxlowbit::PrefersList(products, *target_.device)) return false;
    bool aligned = ways_.IsAligned(AddressAt(step.x));
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      const Places& at = call_.products[i].places;
      for (int64_t place : {at.lhs, at.packed, at.scale, at.zero}) {
        aligned = aligned && ways_.IsAligned(AddressAt(place));
      }
    }
    return aligned;
  }

  // Lets products read the experts of the choices, and the rows of tokens instead of their copies.
  void ListRows() {
    const int64_t top = call_.At(listed_->expert).dimensions()[1];
    for (int64_t i = listed_->first; i < listed_->first + listed_->count; ++i) {
      auto& [p, b] = products_[i];
      const bool reads_tokens = call_.products[i].places.lhs == listed_->out;
      p.listed_per_row = reads_tokens ? top : 1;
      p.waits_for_list = reads_tokens && listed_ != call_.steps.data();
      if (reads_tokens) b.lhs = AddressAt(listed_->x);
      b.group_sizes = AddressAt(listed_->expert);
      b.group_offset = AddressAt(listed_->offset);
    }
  }

  // Redirects to the workspace each result that overlaps another result, or a buffer that the same or a later step
  // reads. (PlanProducts does so for the products of one step.) `copies`: of these results, after all steps.
  ffi::Error RedirectResults(std::vector<PlannedStep>* copies) {
    const auto& steps = call_.steps;
    if (steps.size() < 2) return ffi::Error::Success();
    std::vector<std::vector<int64_t>> read, written;
    for (const Step& step : steps) {
      read.push_back(PlacesRead(call_, step));
      if (listed_ != nullptr) {  // later steps read them too
        for (int64_t place : {listed_->x, listed_->expert, listed_->offset}) {
          if (place != 0) read.back().push_back(place);
        }
      }
      written.push_back(PlacesWritten(call_, step));
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      for (int64_t place : written[i]) {
        if (!OverlapsOthers(place, i, read, written)) continue;
        const AddressExtent extent = ExtentAt(place);
        const int64_t before = room_.bytes;
        const Address own = room_.Allocate(extent.bytes);
        if (own == nullptr) return InvalidArgument(WorkspaceError(extent.bytes, before));
        PlannedStep copy = {PlannedStep::Kind::kCopy};
        copy.from = own, copy.to = extent.data, copy.bytes = extent.bytes;
        copies->push_back(copy);
        moved_.push_back({place, own});
      }
    }
    return ffi::Error::Success();
  }

  bool OverlapsOthers(int64_t place, size_t step, const std::vector<std::vector<int64_t>>& read,
                      const std::vector<std::vector<int64_t>>& written) {
    const AddressExtent own = ExtentAt(place);
    const auto overlaps = [&](int64_t other) {
      return other != place && ways_.Overlap(own, ExtentAt(other));
    };
    const Step& writes = call_.steps[step];
    const bool multiplies = writes.kind == StepKind::kMultiply;
    for (size_t i = multiplies ? step + 1 : step; i < read.size(); ++i) {
      for (int64_t other : read[i]) {
        // Safe in place: the thread that overwrites an element also reads it.
        const bool in_place = i == step && writes.kind == StepKind::kNormalize &&
                              place == writes.total && other == writes.x &&
                              ways_.IsSame(ExtentAt(other).data, own.data);
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

  ffi::Error PlanStep(size_t i) {
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
      case StepKind::kGroup:
        Group(step);
        break;
      case StepKind::kCombine:
        return Combine(step);
      case StepKind::kRoute:
        return Route(step);
    }
    return ffi::Error::Success();
  }

  // Appends loaded steps, which do `action` to `object`.
  ffi::Error Load(const std::vector<PlannedStep>& plan, const std::string& action,
                  const std::string& object) {
    std::vector<std::unique_ptr<const LoadedStep>> steps;
    const cudaError_t status = LoadSteps(plan, *target_.device, &steps);
    if (status != cudaSuccess) return ToError(status, "loading the kernels of " + object);
    for (auto& step : steps) Add(std::move(step), action + object);
    return ffi::Error::Success();
  }

  ffi::Error Multiply(const Step& step) {
    const auto first = products_.begin() + step.first;
    std::vector<PlannedProduct> products(first, first + step.count);
    for (PlannedProduct& product : products) product.problem.pdl = started_;
    started_ = true;
    std::vector<PlannedStep> plan;
    const std::string what = Describe(products[0].problem, ordinal(), products.size() - 1);
    const std::string error = PlanProducts(std::move(products), target_, room_, &ways_, &plan);
    if (!error.empty()) return InvalidArgument(error);
    Divide(step, &plan);
    return Load(plan, "launching ", what);
  }

  // Before an exchange, lets a product hold the next kernel until the last exchange has ended; and send its result, if the
  // next step adds it over devices and writes nothing that the product reads (ops/exchange.cuh).
  void Divide(const Step& step, std::vector<PlannedStep>* plan) {
    sent_ = 0;
    const Step* const next = &step + 1;
    const Step* const end = call_.steps.data() + call_.steps.size();
    const auto adds = [](const Step& later) { return later.kind == StepKind::kNormalize; };
    if (exchange_.parts == 1 || std::none_of(next, end, adds) || !CanDivide(*plan)) return;
    PlannedStep& product = plan->front();
    const int64_t out = call_.products[step.first].places.out;
    const bool sends =
        CanSend(product) && adds(*next) && next->addend == out && IsApart(step, *next);
    if (settled_ && !sends) return;
    product.problem.divided = true;
    product.holds_next = !std::exchange(settled_, true);
    if (!sends) return;
    product.inboxes = exchange_;
    sent_ = out;
  }

  // Whether the plan is one launch that has a divided instance.
  bool CanDivide(const std::vector<PlannedStep>& plan) const {
    if (plan.size() != 1 || !CanHoldNext(plan[0])) return false;
    QuantizedMatmul divided = plan[0].problem;
    divided.divided = true;
    return IsAheadOfTime(KeyOf(divided, plan[0].choice, *target_.device)) ||
           target_.device->can_compile();
  }

  // Whether a step writes nothing that the step before reads.
  bool IsApart(const Step& before, const Step& step) {
    for (int64_t written : PlacesWritten(call_, step)) {
      for (int64_t read : PlacesRead(call_, before)) {
        if (ways_.Overlap(ExtentAt(written), ExtentAt(read))) return false;
      }
    }
    return true;
  }

  void Add(std::unique_ptr<const LoadedStep> step, const std::string& what) {
    started_ = true;
    loaded_.steps.push_back({std::move(step), what});
  }

  ffi::Error Round(const Step& step, size_t i) {
    const ffi::AnyBuffer x = call_.At(step.x);
    PlannedProduct* product = &products_[step.first];
    const bool follows = i + 1 < call_.steps.size() &&
                         call_.steps[i + 1].kind == StepKind::kMultiply && step.count == 1 &&
                         call_.steps[i + 1].first == step.first;
    if (follows && !started_ && FusesRounding(step, x, product)) return ffi::Error::Success();
    const QuantizeRows rows = {*FloatType(x.element_type()),
                               step.to,
                               x.dimensions()[0] * x.dimensions()[1],
                               x.dimensions()[2],
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr,
                               started_,
                               started_ || product->problem.bits > 4,
                               product->problem.apply_lhs_scale};
    Add(std::make_unique<RoundStep>(rows, AddressAt(step.x), AddressAt(step.scales),
                                    AddressAt(step.out), AddressAt(step.out_scale)),
        "launching the rounding of rows");
    return ffi::Error::Success();
  }

  // Lets the product round its rows itself, if a kernel supports it. Otherwise two kernels run, which read all floats
  // before any result is written, so the floats may be unaligned or overlap results.
  bool FusesRounding(const Step& step, const ffi::AnyBuffer& x, PlannedProduct* product) {
    PlannedProduct own = *product;
    auto& [p, b] = own;
    if (!p.apply_lhs_scale || x.element_type() != ffi::DataType::BF16 || step.scales != 0 ||
        x.dimensions()[2] != p.k) {
      return false;
    }
    p.rounding = RoundingTo(step.to);
    b.lhs = AddressAt(step.x);
    b.lhs_scale = {};
    if (!Supports(Kernel::kQmmSm90Stream, p, *target_.device)) return false;
    if (!ways_.IsAligned(b.lhs) || ways_.Overlap(LhsExtent(p, b), OutExtent(p, b))) return false;
    *product = own;
    return true;
  }

  ffi::Error Normalize(const Step& step) {
    started_ = true;
    const ffi::AnyBuffer total = call_.At(step.total);
    const auto type_at = [&](int64_t place) {
      return *FloatType(call_.At(place == 0 ? step.total : place).element_type());
    };
    RmsNorm norm = {type_at(step.total),
                    type_at(step.scales),
                    type_at(step.addend),
                    total.dimensions()[0] * total.dimensions()[1],
                    total.dimensions()[2],
                    nullptr,
                    nullptr,
                    nullptr,
                    nullptr,
                    nullptr,
                    epsilon_,
                    exchange_,
                    step.addend == sent_};
    settled_ = false;
    if (step.out_scale != 0) {
      norm.out_type = call_.At(step.out).element_type() == ffi::DataType::S8 ? ElementType::kInt8
                                                                             : ElementType::kE4m3;
    }
    const NormAddresses addresses = {AddressAt(step.x),      AddressAt(step.addend),
                                     AddressAt(step.scales), AddressAt(step.total),
                                     AddressAt(step.out),    AddressAt(step.out_scale)};
    Add(std::make_unique<NormalizeStep>(norm, addresses, *target_.device),
        "launching the normalization");
    return ffi::Error::Success();
  }

  ExpertAddresses ExpertsAt(const Step& step) const {
    return {AddressAt(step.x),      AddressAt(step.scales), AddressAt(step.out),
            AddressAt(step.expert), AddressAt(step.offset), AddressAt(step.sizes),
            AddressAt(step.place),  AddressAt(step.addend)};
  }

  void Group(const Step& step) {
    if (&step == listed_) return;
    Add(LoadGroup(call_, step, ExpertsAt(step), started_), "launching the grouping of choices");
  }

  ffi::Error Combine(const Step& step) {
    ExpertAddresses addresses = ExpertsAt(step);
    int64_t experts = 0;
    if (listed_ != nullptr && step.place == listed_->place) {  // that place is not written
      addresses.place = {};
      addresses.expert = AddressAt(listed_->expert), addresses.offset = AddressAt(listed_->offset);
      experts = call_.At(listed_->sizes).dimensions()[0];
    }
    std::unique_ptr<const LoadedStep> loaded;
    const ffi::Error error = LoadCombine(call_, step, addresses, experts, *target_.device, &loaded);
    if (error.success()) Add(std::move(loaded), "launching the sum of choices");
    return error;
  }

  ffi::Error Route(const Step& step) {
    std::unique_ptr<const LoadedStep> loaded;
    const ffi::Error error =
        LoadRoute(call_, step, ExpertsAt(step), started_, *target_.device, &loaded);
    if (error.success()) Add(std::move(loaded), "launching the router");
    return error;
  }

  ffi::Error CheckByteCache() const {
    const int capability = target_.device->compute_capability;
    if (capability == kByteCacheCapability) return ffi::Error::Success();
    return InvalidArgument("attention to a cache of 8 bits needs compute capability " +
                           NameOfCapability(kByteCacheCapability) + ", this device has " +
                           NameOfCapability(capability) +
                           "; use a cache in the dtype of the activations.");
  }

  ffi::Error Attention() {
    const bool follows = started_;
    started_ = true;
    if (!AttendBuffers::Has(call_.args(), call_.rets(), call_.attributes)) {
      return InvalidArgument("an attention has at least " + std::to_string(kAttendOperands) +
                             " operands and " + std::to_string(kAttendResults) +
                             " results, two more of each for 8-bit keys, and operands for its "
                             "biases and sinks.");
    }
    const AttendBuffers buffers(call_.args(), call_.rets(), call_.attributes);
    Attend attend;
    ffi::Error error = DecodeAttend(buffers, &call_.attributes, &attend);
    attend.pdl = follows;
    attend.holds_next = follows && exchange_.parts > 1;
    settled_ = true;
    if (error.success()) error = call_.attributes.Missing();
    if (error.success() && Is8Bit(attend.cache)) error = CheckByteCache();
    const int results = static_cast<int>(call_.args().size());
    if (error.success()) error = CheckNoOverlap(buffers, results, &ways_);
    if (error.failure()) return error;
    const std::string what = "attention of " + std::to_string(attend.batch) +
                             " queries on CUDA device " + std::to_string(ordinal());
    error = ToError(LoadAttend(attend, *target_.device), "loading " + what);
    if (error.failure()) return error;
    Add(std::make_unique<AttendStep>(attend, buffers, results, room_, *target_.device),
        "launching " + what);
    return error;
  }

  Call& call_;
  const Target target_;
  Ways& ways_;
  LoadedCall& loaded_;
  Room room_;
  Exchange exchange_;
  int64_t sent_ = 0;  // place of the last product's result, if it is sent to devices
  bool settled_;      // the next kernel starts after the last exchange has ended
  float epsilon_ = 0;
  bool started_;                  // a kernel of the handler has been launched
  const Step* listed_ = nullptr;  // a grouping of choices that no kernel computes
  std::vector<std::pair<int64_t, Address>> moved_;
  std::vector<PlannedProduct> products_;
};

}  // namespace

ffi::Error PlanCall(Call* call, const Target& target, Ways* ways, LoadedCall* loaded) {
  const ffi::Error error = call->Decode();
  return error.failure() ? error : Sequence(call, target, ways, loaded).Run();
}

}  // namespace jaxlowbit
