// SPDX-License-Identifier: Apache-2.0

#include "cuda/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cuda/kernels/sm80/plan.h"
#include "cuda/kernels/sm90_stream/select.h"
#include "cuda/limits.h"
#include "cuda/select/cache.h"
#include "cuda/select/select.h"

namespace jaxlowbit {
namespace {

using Kind = PlannedStep::Kind;

int64_t PlaceBytes(int64_t bytes) { return CeilDiv(bytes, kPlaceAlignment) * kPlaceAlignment; }

PlannedStep CopyOf(const Address& from, const Address& to, int64_t bytes) {
  PlannedStep copy = {Kind::kCopy};
  copy.from = from, copy.to = to, copy.bytes = bytes;
  return copy;
}

bool IsRedirected(const std::vector<PlannedProduct>& products, size_t i, Ways* ways) {
  const AddressExtent out = OutExtent(products[i].problem, products[i].buffers);
  for (size_t j = 0; j < products.size(); ++j) {
    const auto& [problem, buffers] = products[j];
    if (j != i && ways->Overlap(out, OutExtent(problem, buffers))) return true;
    const bool in_place =
        buffers.residual != nullptr && ways->IsSame(buffers.residual, buffers.out);
    for (const AddressExtent& operand : OperandExtents(problem, buffers, in_place)) {
      if (ways->Overlap(out, operand)) return true;
    }
  }
  return false;
}

// Plans the products of one call.
class Planner {
 public:
  Planner(const Target& target, Room room, Ways* ways, std::vector<PlannedStep>* steps)
      : target_(target), room_(room), ways_(*ways), steps_(*steps) {}

  std::string Run(std::vector<PlannedProduct> products) {
    std::vector<PlannedStep> results;  // copies of redirected results, after all launches
    std::string error = RedirectResults(&products, &results);
    if (!error.empty()) return error;
    AlignSharedLhs(&products);
    for (size_t i = 0; i < products.size() && error.empty();) {
      if (i > 0) products[i].problem.pdl = true;
      const size_t joined = Join(&products[i], products.size() - i);
      i += std::max<size_t>(joined, 1);
      if (joined == 0) error = Split(products[i - 1]);
    }
    steps_.insert(steps_.end(), results.begin(), results.end());
    return error;
  }

  // Appends the launch of one product, after its gather kernel if it needs one.
  void Multiply(PlannedProduct product, const Choice& choice) {
    auto& [p, b] = product;
    const bool gathers =
        choice.kernel == Kernel::kQmmSm90Stream &&
        sm90_stream::LhsPathOf(p, *target_.device, choice) == sm90_stream::LhsPath::kGathers;
    if (p.permuted_parts > 0 && !gathers) {
      PlannedStep gather = {Kind::kGather, p};
      gather.products = {product};
      steps_.push_back(gather);
      p.permuted_parts = 0;
      p.pdl = true;
      p.lhs_aligned = ways_.IsAligned(b.gathered);
      b.lhs = b.gathered;
    }
    Launch(p, choice, {product});
  }

 private:
  // Redirects results that overlap operands or results of any product.
  std::string RedirectResults(std::vector<PlannedProduct>* products,
                              std::vector<PlannedStep>* results) {
    std::vector<size_t> redirected;
    int64_t needed = 0;
    for (size_t i = 0; i < products->size(); ++i) {
      const auto& [problem, buffers] = (*products)[i];
      if (!IsRedirected(*products, i, &ways_)) continue;
      redirected.push_back(i);
      needed += PlaceBytes(OutExtent(problem, buffers).bytes);
    }
    if (needed > room_.bytes) return WorkspaceError(needed, room_.bytes);
    for (size_t i : redirected) {
      auto& [problem, buffers] = (*products)[i];
      const AddressExtent out = OutExtent(problem, buffers);
      buffers.out = room_.Allocate(out.bytes);
      results->push_back(CopyOf(buffers.out, out.data, out.bytes));
    }
    return "";
  }

  // Makes one copy for all products that share an lhs that is not aligned, if there is room.
  void AlignSharedLhs(std::vector<PlannedProduct>* products) {
    if (products->size() < 2) return;
    const auto& [problem, buffers] = products->front();
    const Address shared = buffers.lhs;
    if (ways_.IsAligned(shared)) return;
    const Address place = Aligned(LhsExtent(problem, buffers), &room_);
    if (place == nullptr) return;
    for (PlannedProduct& product : *products) {
      if (ways_.IsSame(product.buffers.lhs, shared)) product.buffers.lhs = place;
    }
    products->front().problem.pdl = false;
  }

  // Returns the operand if it is aligned, else a copy; null if the workspace is full.
  Address Aligned(const AddressExtent& operand, Room* room) {
    if (ways_.IsAligned(operand.data)) return operand.data;
    const Address place = room->Allocate(operand.bytes);
    if (place != nullptr) steps_.push_back(CopyOf(operand.data, place, operand.bytes));
    return place;
  }

  // Copies unaligned operands as far as the workspace allows, and sets lhs_aligned and weights_aligned.
  void Align(PlannedProduct* product, Room* room) {
    auto& [p, b] = *product;
    // Packed weights are too large to be copied for one product.
    bool aligned = ways_.IsAligned(b.packed);
    const auto align = [&](const AddressExtent& operand, Address* data) {
      if (operand.bytes == 0 || operand.data == nullptr) return;
      const Address place = aligned ? Aligned(operand, room) : operand.data;
      aligned &= place != nullptr;
      if (aligned) *data = place;
    };
    align(ScaleExtent(p, b), &b.scale);
    align(ZeroExtent(p, b), &b.zero);
    p.weights_aligned = aligned;
    // With other row lengths, rows are unaligned even if lhs begins at an aligned address.
    aligned = p.lhs_columns() * SizeOf(p.lhs) % kAlignment == 0;
    align(LhsExtent(p, b), &b.lhs);
    align(PermutationExtent(p, b), &b.permutation);
    p.lhs_aligned = aligned;
  }

  bool MayJoin(const PlannedProduct& a, const PlannedProduct& b) {
    if (!sm90_stream::MayJoin(a.problem, b.problem)) return false;
    for (const PlannedProduct* product : {&a, &b}) {
      const Addresses& own = product->buffers;
      if (own.bias != nullptr || own.residual != nullptr) return false;
      for (const Address& read : {own.lhs, own.packed, own.scale, own.zero}) {
        if (!ways_.IsAligned(read)) return false;
      }
    }
    if (!ways_.IsSame(a.buffers.lhs, b.buffers.lhs)) return false;
    // A launch has a single table.
    return a.problem.codebook != Codebook::kTable ||
           std::equal(a.buffers.codebook, a.buffers.codebook + (size_t{1} << a.problem.bits),
                      b.buffers.codebook);
  }

  // Appends one launch of qmm_sm90_stream for several of the first `count` products. Returns how many it computes; 0 if
  // the first product is launched separately.
  size_t Join(const PlannedProduct* products, size_t count) {
    size_t joining = 1;
    while (joining < count && joining < sm90_stream::kMaxProducts &&
           MayJoin(products[0], products[joining])) {
      ++joining;
    }
    if (joining == 1) return 0;
    QuantizedMatmul joined = products[0].problem;
    for (size_t i = 1; i < joining; ++i) {
      joined = sm90_stream::Join(joined, products[i].problem);
    }
    if (!Supports(joined, *target_.device)) return 0;
    const Choice choice = SelectCached(joined, *target_.device, room_.bytes, target_.tuned);
    if (choice.kernel != Kernel::kQmmSm90Stream) return 0;
    Launch(joined, choice, {products, products + joining});
    return joining;
  }

  // Rows of an unaligned lhs that fit half of the workspace, as a multiple of the largest tile; unlimited if that is 0
  // or if a copy would not help.
  int64_t RowsToCopy(const PlannedProduct& product) {
    const QuantizedMatmul& p = product.problem;
    constexpr int64_t kLargestTile = 256;
    const int64_t row_bytes = p.lhs_columns() * SizeOf(p.lhs);
    const int64_t rows = room_.bytes / 2 / row_bytes / kLargestTile * kLargestTile;
    const bool copied = !ways_.IsAligned(product.buffers.lhs) && row_bytes % kAlignment == 0;
    return copied && p.permuted_parts == 0 && rows > 0 ? rows : std::numeric_limits<int64_t>::max();
  }

  // Appends the launches of a product: one, or several if it exceeds the limits of a launch or if an unaligned lhs is
  // copied in pieces.
  std::string Split(const PlannedProduct& product) {
    const QuantizedMatmul& p = product.problem;
    if (p.is_ragged()) {  // its tiles are blocks of rows
      PlannedProduct whole = product;
      return Part(&whole);
    }
    const auto [most_batch, most_rows] = LimitsOf(p);
    const int64_t to_copy = RowsToCopy(product);
    const int64_t max_rows = std::min(most_rows, to_copy);
    const int64_t max_batch =
        p.m > max_rows ? 1 : std::min(most_batch, std::max<int64_t>(to_copy / p.m, 1));
    std::string error;
    for (int64_t element = 0; element < p.batch; element += max_batch) {
      const PlannedProduct elements =
          p.batch <= max_batch
              ? product
              : BatchPart(product, element, std::min(max_batch, p.batch - element));
      for (int64_t row = 0; row < p.m; row += max_rows) {
        PlannedProduct part =
            p.m <= max_rows ? elements : RowPart(elements, row, std::min(max_rows, p.m - row));
        part.problem.pdl = p.pdl && element == 0 && row == 0;
        error = Part(&part);
        if (!error.empty()) return error;
      }
    }
    return error;
  }

  // Maximum batch elements and rows of one of them per launch: grids and positions in them are 32-bit numbers. In units
  // of the smallest tile of any kernel.
  static std::pair<int64_t, int64_t> LimitsOf(const QuantizedMatmul& problem) {
    constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
    constexpr int64_t kMaxGridY = 65535;
    const int64_t tiles_n = std::max(problem.strips(), problem.k_blocks());
    const int64_t rows = std::max<int64_t>(kLimit / tiles_n, 1) * sm80::kMinBlockM;
    const int64_t tiles = CeilDiv(std::min(problem.m, rows), sm80::kMinBlockM) * tiles_n;
    return {std::clamp<int64_t>(kLimit / std::max(tiles, problem.m), 1, kMaxGridY),
            std::min(rows, kLimit)};
  }

  // Appends one launch of a product, after copies of its unaligned operands.
  std::string Part(PlannedProduct* product) {
    auto& [p, b] = *product;
    b.workspace = room_.workspace;
    Room room = room_;
    const size_t before = steps_.size();
    Align(product, &room);
    if (steps_.size() > before) p.pdl = false;  // the previous kernel writes an operand
    const int64_t rows = p.batch * p.m * p.weights_per_element();
    const int64_t sums_bytes = std::min(room.bytes, MaxPartialSumsBytes(rows, p.out_columns()));
    const Choice choice = SelectCached(p, *target_.device, sums_bytes, target_.tuned);
    // Some formats have one kernel, which needs aligned operands; the workspace has no room to align these.
    if (!Supports(choice.kernel, p, *target_.device)) {
      return "operands of a product in this format must begin at multiples of 16 bytes; put "
             "jax.lax.optimization_barrier around them.";
    }
    Multiply(*product, choice);
    return "";
  }

  void Launch(const QuantizedMatmul& problem, const Choice& choice,
              std::vector<PlannedProduct> products) {
    PlannedStep step = {Kind::kMultiply, problem, choice, std::move(products)};
    if (choice.kernel == Kernel::kQmmSm90) {
      const Addresses& b = step.products.front().buffers;
      step.out_aligned = ways_.IsAligned(b.out);
      step.residual_aligned = ways_.IsAligned(b.residual);
    }
    steps_.push_back(std::move(step));
  }

  Target target_;
  Room room_;
  Ways& ways_;
  std::vector<PlannedStep>& steps_;
};

}  // namespace

std::string WorkspaceError(int64_t needed, int64_t workspace_bytes) {
  return "results that lie over operands of the call take " + std::to_string(needed) +
         " bytes of a workspace that has " + std::to_string(workspace_bytes) +
         "; put jax.lax.optimization_barrier around the result.";
}

Address Room::Allocate(int64_t wanted) {
  if (wanted > bytes) return {};
  bytes = (bytes - wanted) / kPlaceAlignment * kPlaceAlignment;
  return Offset(workspace, bytes);
}

std::string PlanProducts(std::vector<PlannedProduct> products, const Target& target, Room room,
                         Ways* ways, std::vector<PlannedStep>* steps) {
  const auto is_empty = [](const PlannedProduct& product) {
    return product.problem.batch == 0 || product.problem.m == 0;
  };
  products.erase(std::remove_if(products.begin(), products.end(), is_empty), products.end());
  return Planner(target, room, ways, steps).Run(std::move(products));
}

bool CanHoldNext(const PlannedStep& step) {
  return step.kind == Kind::kMultiply && step.choice.kernel == Kernel::kQmmSm90Stream &&
         !step.problem.is_ragged();
}

bool CanSend(const PlannedStep& step) {
  const QuantizedMatmul& p = step.problem;
  return CanHoldNext(step) && step.products.size() == 1 && p.batch == 1 && !p.epilogue.gated &&
         p.out == ElementType::kF32;
}

std::vector<PlannedStep> PlanChoice(const PlannedProduct& product, const Choice& choice,
                                    const Device& device, Ways* ways) {
  std::vector<PlannedStep> steps;
  Planner({&device}, {}, ways, &steps).Multiply(product, choice);
  return steps;
}

}  // namespace jaxlowbit
