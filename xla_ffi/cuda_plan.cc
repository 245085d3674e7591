// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cuda_plan.h"

#include <algorithm>
#include <utility>

#include "cuda/limits.h"
#include "cuda/ops/exchange.h"
#include "cuda/select/select.h"
#include "xla_ffi/cuda_error.h"
#include "xla_ffi/cuda_normalize.h"
#include "xla_ffi/cuda_steps.h"

namespace jaxlowbit {
namespace {

std::vector<int64_t> PlacesRead(const std::vector<Product>& products, const Step& step) {
  std::vector<int64_t> places;
  switch (step.kind) {
    case StepKind::kMultiply:
      for (int64_t i = step.first; i < step.first + step.count; ++i) {
        const Places& at = products[i].places;
        for (int64_t place :
             {at.lhs, at.packed, at.scale, at.zero, at.unit, at.index, at.group_sizes,
              at.group_offset, at.permutation, at.bias, at.residual, at.lhs_scale}) {
          if (place != 0) places.push_back(place);
        }
      }
      break;
    case StepKind::kRound:
    case StepKind::kNormalize:
    case StepKind::kRoute:
      for (int64_t place : {step.x, step.addend, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      break;
    case StepKind::kGroup:
    case StepKind::kCombine:
      for (int64_t place : {step.x, step.expert, step.offset, step.scales}) {
        if (place != 0) places.push_back(place);
      }
      if (step.kind == StepKind::kCombine) places.push_back(step.place);
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
    places = {step.total, step.out, step.out_scale, step.sizes};
    if (step.kind == StepKind::kGroup) places.push_back(step.place);
    if (step.kind == StepKind::kRoute) places.push_back(step.expert);
  } else {
    for (int64_t i = step.first; i < step.first + step.count; ++i) {
      places.push_back(call.products[i].places.out);
    }
  }
  places.erase(std::remove(places.begin(), places.end(), 0), places.end());
  return places;
}

// Whether the normalized rows of step `i` are read only by the products of the next step, as lhs.
bool OnlyNextMultiplies(const std::vector<Product>& products, const std::vector<Step>& steps,
                        size_t i) {
  const Step& step = steps[i];
  if (step.kind != StepKind::kNormalize || step.scales == 0 || step.addend == 0 || step.out >= 0 ||
      step.out_scale != 0 || i + 1 == steps.size() || steps[i + 1].kind != StepKind::kMultiply) {
    return false;
  }
  const auto reads = [&](const Step& other) {
    const std::vector<int64_t> places = PlacesRead(products, other);
    return std::count(places.begin(), places.end(), step.out);
  };
  const Step& next = steps[i + 1];
  for (int64_t j = next.first; j < next.first + next.count; ++j) {
    if (products[j].places.lhs != step.out) return false;
  }
  if (reads(next) != next.count) return false;
  for (size_t j = i + 2; j < steps.size(); ++j) {
    if (reads(steps[j]) > 0) return false;
    if (steps[j].kind == StepKind::kNormalize && steps[j].out == step.out) break;  // written anew
  }
  return true;
}

std::string NameOfCapability(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

class Sequence {
 public:
  Sequence(Call* call, const Target& target, Ways* ways, LoadedCall* loaded)
      : call_(*call),
        target_(target),
        ways_(*ways),
        loaded_(*loaded),
        started_(call->attributes.Find<bool>("follows").value_or(false)) {}

  ffi::Error Run() {
    ffi::Error error = FindWorkspace();
    if (error.success()) error = CheckSteps();
    if (error.failure() || IsEmpty()) return error;
    error = FindList();
    if (error.success()) error = FindDevices();
    if (error.success()) error = FindMerged();
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
      const ffi::Error error = step.kind == StepKind::kNormalize ? CheckNormalize(call_, step)
                               : step.kind == StepKind::kRound   ? CheckRound(step)
                                                                 : ffi::Error::Success();
      if (error.failure()) return error;
    }
    epsilon_ = call_.attributes.Find<float>("epsilon").value_or(0);
    return ffi::Error::Success();
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
    const auto shape = call_.At(step->x).dimensions();
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

  // Checks sums of choices and routers. Finds the steps that the kernel of the next step computes, too: a sum that a
  // normalization adds, and a normalization of the rows of a router.
  ffi::Error FindMerged() {
    for (size_t i = 0; i < call_.steps.size(); ++i) {
      const Step& step = call_.steps[i];
      CombineChoices choices;
      RouteChoices route;
      ffi::Error error = ffi::Error::Success();
      if (step.kind == StepKind::kCombine)
        error = ReadCombine(call_, step, *target_.device, &choices);
      if (step.kind == StepKind::kRoute) error = ReadRoute(call_, step, *target_.device, &route);
      if (error.failure()) return error;
      if (step.kind == StepKind::kCombine && i + 1 < call_.steps.size()) {
        const Step& next = call_.steps[i + 1];
        if (next.kind == StepKind::kNormalize && next.addend == step.out &&
            SupportsChoices(NormAsRead(next), choices) && AreAligned({step.x, step.out}) &&
            AreAligned({next.x, next.total, next.out, next.scales})) {
          merged_.push_back(&step);
        }
      }
      if (step.kind == StepKind::kRoute && i > 0 &&
          RoutesNormalized(call_.steps[i - 1], step, route)) {
        merged_.push_back(&call_.steps[i - 1]);
      }
    }
    return ffi::Error::Success();
  }

  bool RoutesNormalized(const Step& norm, const Step& step, const RouteChoices& route) {
    return norm.kind == StepKind::kNormalize && norm.out == step.x && norm.scales != 0 &&
           norm.addend != 0 && !MergesPrevious(norm) && SupportsNorm(route, NormAsRead(norm)) &&
           AreAligned({norm.x, norm.addend, norm.scales, norm.total, norm.out, step.scales}) &&
           !ways_.Overlap(ExtentAt(norm.x), ExtentAt(norm.total));
  }

  bool AreAligned(std::initializer_list<int64_t> places) {
    return std::all_of(places.begin(), places.end(), [&](int64_t place) {
      return place == 0 || ways_.IsAligned(AddressAt(place));
    });
  }

  bool IsMerged(const Step& step) const {
    return std::find(merged_.begin(), merged_.end(), &step) != merged_.end();
  }
  bool MergesPrevious(const Step& step) const {
    return &step != call_.steps.data() && IsMerged((&step)[-1]);
  }

  // Redirects to the workspace each result that overlaps another result, or a buffer that the same or a later step
  // reads. (PlanProducts does so for the products of one step.) `copies`: of these results, after all steps.
  ffi::Error RedirectResults(std::vector<PlannedStep>* copies) {
    const auto& steps = call_.steps;
    if (steps.size() < 2) return ffi::Error::Success();
    std::vector<std::vector<int64_t>> read, written;
    for (const Step& step : steps) {
      read.push_back(PlacesRead(call_.products, step));
      if (MergesPrevious(step)) {
        read.back().insert(read.back().end(), read[read.size() - 2].begin(),
                           read[read.size() - 2].end());
      }
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
    if (IsMerged(step)) return ffi::Error::Success();
    switch (step.kind) {
      case StepKind::kMultiply:
        return Multiply(step);
      case StepKind::kRound:
        return Round(step, i);
      case StepKind::kNormalize:
        return Normalize(step, i);
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
    const Step* norm = std::exchange(waiting_, nullptr);
    if (norm != nullptr && !MergeNorm(PlannedNormOf(NormAsRead(*norm), NormAt(*norm)),
                                      *target_.device, &ways_, &plan)) {
      const ffi::Error added = AddNorm(*norm);
      if (added.failure()) return added;
    }
    return Load(plan, "launching ", what);
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

  // Leaves the normalization to the products of the next step if they may merge it; else appends it.
  ffi::Error Normalize(const Step& step, size_t i) {
    const bool waits = started_ && exchange_.parts == 1 && !MergesPrevious(step) &&
                       OnlyNextMultiplies(call_.products, call_.steps, i);
    started_ = true;
    if (waits) {
      waiting_ = &step;
      return ffi::Error::Success();
    }
    return AddNorm(step);
  }

  NormAddresses NormAt(const Step& step) const {
    return {AddressAt(step.x),     AddressAt(step.addend), AddressAt(step.scales),
            AddressAt(step.total), AddressAt(step.out),    AddressAt(step.out_scale)};
  }

  RmsNorm NormAsRead(const Step& step) const { return ReadNorm(call_, step, epsilon_, exchange_); }

  ffi::Error AddNorm(const Step& step) {
    RmsNorm norm = NormAsRead(step);
    NormAddresses addresses = NormAt(step);
    if (MergesPrevious(step)) {
      const ffi::Error error = ReadSum((&step)[-1], &norm.choices, &addresses.choices);
      if (error.failure()) return error;
    }
    Add(LoadNormalize(norm, addresses, *target_.device), "launching the normalization");
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

  // The sum of choices of a step, except for pointers, and its addresses.
  ffi::Error ReadSum(const Step& step, CombineChoices* choices, ExpertAddresses* addresses) const {
    *addresses = ExpertsAt(step);
    const ffi::Error error = ReadCombine(call_, step, *target_.device, choices);
    if (listed_ != nullptr && step.place == listed_->place) {  // that place is not written
      addresses->place = {};
      addresses->expert = AddressAt(listed_->expert);
      addresses->offset = AddressAt(listed_->offset);
      choices->experts = static_cast<int>(call_.At(listed_->sizes).dimensions()[0]);
    }
    return error;
  }

  ffi::Error Combine(const Step& step) {
    CombineChoices choices;
    ExpertAddresses addresses;
    const ffi::Error error = ReadSum(step, &choices, &addresses);
    if (error.success()) Add(LoadCombine(choices, addresses), "launching the sum of choices");
    return error;
  }

  ffi::Error Route(const Step& step) {
    RouteChoices route;
    const ffi::Error error = ReadRoute(call_, step, *target_.device, &route);
    if (error.failure()) return error;
    route.pdl = started_;
    NormAddresses norm;
    if (MergesPrevious(step)) {
      route.norm = NormAsRead((&step)[-1]);
      norm = NormAt((&step)[-1]);
    }
    Add(LoadRoute(route, ExpertsAt(step), norm), "launching the router");
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
  float epsilon_ = 0;
  bool started_;                     // a kernel of the handler has been launched
  const Step* listed_ = nullptr;     // a grouping of choices that no kernel computes
  const Step* waiting_ = nullptr;    // a normalization that the next products may merge
  std::vector<const Step*> merged_;  // other steps that the kernel of the next step computes, too
  std::vector<std::pair<int64_t, Address>> moved_;
  std::vector<PlannedProduct> products_;
};

// Any distinct numbers.
Address TypicalAddress(int64_t place) {
  return {static_cast<int>(place == 0 ? -1 : place > 0 ? 2 * place : -2 * place + 1), 0};
}

// A normalization in front of a product, as far as attributes say; the type of its scales does not matter.
PlannedNorm TypicalNorm(const std::vector<Product>& products, const Step& step,
                        const QuantizedMatmul& next) {
  ElementType addend = next.lhs;
  for (const Product& product : products) {
    if (product.places.out == step.addend) addend = product.problem.out;
  }
  return {next.lhs,
          addend,
          next.lhs,
          next.m,
          next.k,
          0,
          TypicalAddress(step.x),
          TypicalAddress(step.addend),
          TypicalAddress(step.scales),
          TypicalAddress(step.total)};
}

}  // namespace

ffi::Error PlanCall(Call* call, const Target& target, Ways* ways, LoadedCall* loaded) {
  const ffi::Error error = call->Decode();
  return error.failure() ? error : Sequence(call, target, ways, loaded).Run();
}

std::vector<PlannedStep> PlanAttributes(const std::vector<Product>& products,
                                        const std::vector<Step>& steps, const Target& target) {
  std::vector<PlannedStep> plan;
  std::vector<PlannedProduct> located;
  for (const Product& product : products) {
    located.push_back({product.problem, {}});
    Addresses& b = located.back().buffers;
    b.codebook = product.codebook;
#define JAXLOWBIT_PLACE(name) b.name = TypicalAddress(product.places.name);
#include "xla_ffi/call.def"
  }
  const Address workspace = {0, 0};
  for (const Step& step : steps) {
    if (step.kind == StepKind::kRound && products[step.first].problem.apply_lhs_scale &&
        step.scales == 0) {
      located[step.first].problem.rounding = RoundingTo(step.to);
    }
    const auto first = located.begin() + step.first;
    if (step.kind == StepKind::kGroup) {
      std::vector<QuantizedMatmul> problems;
      for (auto i = first; i != first + step.count; ++i) problems.push_back(i->problem);
      if (!PrefersList(problems, *target.device)) continue;
      for (auto i = first; i != first + step.count; ++i) i->problem.listed_per_row = 1;
    }
    if (step.kind != StepKind::kMultiply) continue;
    std::vector<PlannedProduct> together(first, first + step.count);
    for (PlannedProduct& product : together) {
      QuantizedMatmul& p = product.problem;
      if (p.batch < 1 || p.m < 1 || p.num_weights < 1) return plan;
      p.pdl = &step != &steps.front() && p.rounding == Rounding::kNone;
      if (!Supports(p, *target.device)) return plan;
    }
    Ways typical(nullptr);
    std::vector<PlannedStep> own;
    PlanProducts(std::move(together), target, {workspace, kMaxWorkspaceBytes}, &typical, &own);
    const size_t number = &step - steps.data();
    if (number > 1 && steps[number - 2].kind != StepKind::kCombine &&
        OnlyNextMultiplies(products, steps, number - 1)) {
      MergeNorm(TypicalNorm(products, steps[number - 1], first->problem), *target.device, &typical,
                &own);
    }
    plan.insert(plan.end(), own.begin(), own.end());
  }
  return plan;
}

}  // namespace jaxlowbit
