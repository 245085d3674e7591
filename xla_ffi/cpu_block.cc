// SPDX-License-Identifier: Apache-2.0

#include "xla_ffi/cpu_block.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/qmm_cpu.h"
#include "cpu/tuning.h"
#include "cuda/limits.h"
#include "xla_ffi/cpu_team.h"

namespace jaxlowbit {
namespace {

constexpr int64_t kRowsPerTask = kPermutedRows;
constexpr int64_t kLine = sizeof(CacheLine) / sizeof(float);

constexpr size_t kWeights = 3;  // out, gate_up and down, before the following

struct BlockBuffers {
  ffi::AnyBuffer attended, residual, norm;
  ffi::AnyBuffer result, projected, sum, normed, hidden;
  std::optional<ffi::AnyBuffer> following_norm;
};

// The products of one block and the memory that its phases share.
class CpuBlock {
 public:
  CpuBlock(const BlockBuffers& buffers, const std::vector<Operands>& products,
           Activation activation, float epsilon)
      : clone_(*RunnableCpuClones().front()), m_(products[0].problem.m) {
    const QuantizedMatmul& p = products[0].problem;
    const QuantizedMatmul& up = products[1].problem;
    for (const auto& [problem, _] : products) {
      multiplications_ += problem.m * problem.n * problem.k * problem.weights_per_element();
    }
    accumulators_.resize(CeilDiv(2 * m_ * up.n, kLine));
    added_ = {p.lhs,
              *FloatType(buffers.norm.element_type()),
              p.n,
              buffers.residual.untyped_data(),
              buffers.projected.untyped_data(),
              buffers.norm.untyped_data(),
              buffers.sum.untyped_data(),
              buffers.normed.untyped_data(),
              epsilon};
    finished_ = added_;
    finished_.x = added_.total;
    finished_.total = buffers.result.untyped_data();
    finished_.scales = nullptr;
    if (buffers.following_norm) {
      finished_.scale_type = *FloatType(buffers.following_norm->element_type());
      finished_.scales = buffers.following_norm->untyped_data();
    }
    gate_ = accumulators_.front().values;
    gated_ = {p.lhs, activation, up.n, gate_, gate_ + m_ * up.n, buffers.hidden.untyped_data()};
    for (size_t i = 0; i < products.size(); ++i) {
      if (i == 1) {
        AddPair(products[i]);
      } else {
        Add(products[i].problem, products[i].buffers);
      }
    }
  }

  void Run(ffi::ThreadPool pool) {
    const int64_t threads = UsefulThreads(pool, multiplications_);
    size_t lines = 0;
    for (const CpuMatmul& matmul : matmuls_) lines = std::max(lines, matmul.scratch_lines());
    const auto scratch = AllocateLines(threads * lines);
    const auto multiply = [&](size_t begin, size_t end) {
      int64_t tasks = 0;
      for (size_t i = begin; i < end; ++i) tasks += matmuls_[i].num_tasks();
      team_.AddPhase(tasks, [this, &scratch, lines, begin](int64_t task, int64_t thread) {
        size_t i = begin;
        while (task >= matmuls_[i].num_tasks()) task -= matmuls_[i++].num_tasks();
        matmuls_[i].Run(task, scratch.get() + thread * lines);
      });
    };
    // Each task also permutes its rows for the next products.
    const auto between = [&](auto function, const auto& rows, size_t begin, size_t end) {
      team_.AddPhase(CeilDiv(m_, kRowsPerTask),
                     [this, function, &rows, begin, end](int64_t task, int64_t) {
                       function(rows, task * kRowsPerTask, std::min(m_, (task + 1) * kRowsPerTask));
                       for (size_t i = begin; i < end; ++i) {
                         if (!shares_[i] && task < matmuls_[i].num_permute_tasks())
                           matmuls_[i].Permute(task);
                       }
                     });
    };
    team_.AddPhase(matmuls_[0].num_permute_tasks(),
                   [this](int64_t task, int64_t) { matmuls_[0].Permute(task); });
    multiply(0, 1);
    between(clone_.rows.add, added_, 1, 3);
    multiply(1, 3);
    between(clone_.rows.gate, gated_, 3, 4);
    multiply(3, 4);
    between(clone_.rows.add, finished_, 4, matmuls_.size());
    multiply(4, matmuls_.size());
    team_.Run(pool, threads);
  }

 private:
  // Gate and up are two products in float32.
  void AddPair(const Operands& both) {
    for (int64_t i = 0; i < 2; ++i) {
      auto [problem, buffers] = both;
      problem.epilogue.gated = false;
      problem.out = ElementType::kF32;
      buffers.out = gate_ + i * m_ * problem.n;
      if (buffers.index != nullptr) {
        buffers.index += i;
      } else if (problem.num_weights > 1) {
        SkipWeights(problem, i, &buffers);
        problem.num_weights = 1;
      }
      Add(problem, buffers);
    }
  }

  // Reuses the rows that the previous product permuted, if they match; otherwise permutes them again.
  void Add(const QuantizedMatmul& problem, const Buffers& buffers) {
    const bool shares = matmuls_.size() > 0 && matmuls_.back().SharesPermuted(problem, buffers);
    shares_.push_back(shares);
    if (!shares) permuted_.push_back(AllocateLines(CpuMatmul::PermutedLines(problem, clone_)));
    matmuls_.emplace_back(problem, buffers, clone_, permuted_.back().get());
  }

  const CpuClone& clone_;
  int64_t m_, multiplications_ = 0;
  std::vector<std::unique_ptr<CacheLine[]>> permuted_;
  std::vector<CacheLine> accumulators_;
  float* gate_;
  AddedRows added_, finished_;
  GatedRows gated_;
  std::vector<CpuMatmul> matmuls_;  // out, gate, up, down, then the following
  std::vector<bool> shares_;        // permuted rows with the product before
  Team team_;
};

// Results must not overlap operands that are read later. Calls lowered from Python have separate result buffers.
ffi::Error CheckNoOverlap(const BlockBuffers& b, const std::vector<Operands>& products) {
  std::vector<Extent> read = {ExtentOf(b.residual), ExtentOf(b.norm), ExtentOf(b.attended)};
  if (b.following_norm) read.push_back(ExtentOf(*b.following_norm));
  std::vector<Extent> written = {ExtentOf(b.result), ExtentOf(b.projected), ExtentOf(b.sum),
                                 ExtentOf(b.normed), ExtentOf(b.hidden)};
  for (size_t i = 0; i < products.size(); ++i) {
    const auto& [problem, buffers] = products[i];
    for (const Extent& operand : {PackedExtent(problem, buffers), ScaleExtent(problem, buffers),
                                  ZeroExtent(problem, buffers), UnitExtent(problem, buffers)}) {
      read.push_back(operand);
    }
    if (i >= kWeights) written.push_back(OutExtent(problem, buffers));
  }
  for (const Extent& target : written) {
    for (const Extent& operand : read) {
      if (!Overlap(target, operand)) continue;
      return InvalidArgument(
          "a result lies over an operand of the call; put jax.lax.optimization_barrier around the "
          "results.");
    }
  }
  return ffi::Error::Success();
}

// Finds the buffers if the steps of a call form a block.
ffi::Error FindBuffers(const Call& call, std::optional<BlockBuffers>* found) {
  const auto& steps = call.steps;
  const size_t products = call.products.size();
  const auto multiplies = [&](size_t i, size_t first, size_t count) {
    return steps[i].kind == StepKind::kMultiply && steps[i].first == static_cast<int64_t>(first) &&
           steps[i].count == static_cast<int64_t>(count);
  };
  const bool follows = products > kWeights;
  const bool fits = products >= kWeights && steps.size() == (follows ? 6 : 5) &&
                    multiplies(0, 0, 1) && multiplies(2, 1, 1) && multiplies(3, 2, 1) &&
                    steps[1].kind == StepKind::kNormalize &&
                    steps[4].kind == StepKind::kNormalize &&
                    (!follows || multiplies(5, kWeights, products - kWeights));
  const auto given = [](const Step& step, bool scales) {
    return step.x != 0 && step.addend != 0 && step.total != 0 && step.out_scale == 0 &&
           (step.scales != 0) == scales && (step.out != 0 || !scales);
  };
  if (!fits || !given(steps[1], true) || !given(steps[4], follows)) {
    return InvalidArgument("the steps of the call are none that the CPU has.");
  }
  const auto& of_products = call.products;
  *found = BlockBuffers{call.At(of_products[0].places.lhs),
                        call.At(steps[1].x),
                        call.At(steps[1].scales),
                        call.At(steps[4].total),
                        call.At(of_products[0].places.out),
                        call.At(steps[1].total),
                        call.At(steps[1].out),
                        call.At(of_products[1].places.out),
                        std::nullopt};
  if (follows) (*found)->following_norm = call.At(steps[4].scales);
  return ffi::Error::Success();
}

// `p`: the first product of the block.
ffi::Error CheckRows(const BlockBuffers& buffers, const QuantizedMatmul& p) {
  const auto is_rows = [&](std::string_view name, const ffi::AnyBuffer& rows) {
    const ffi::Error error = CheckType(name, rows, TypeOf(p.lhs));
    return error.failure() ? error : CheckShape(name, rows, {1, p.m, p.n}, "[1, m, n]");
  };
  const auto is_scales = [&](std::string_view name, const ffi::AnyBuffer& scales) {
    const auto type = FloatType(scales.element_type());
    const ffi::Error error = CheckType(name, scales, type == p.lhs || type == ElementType::kF32,
                                       "f32 or the type of attended");
    return error.failure() ? error : CheckShape(name, scales, {p.n}, "[n]");
  };
  if (p.n % 8 != 0 || p.n > kMaxRmsNormColumns) {
    return InvalidArgument("rows are normalized that have " + std::to_string(p.n) +
                           " elements, but it must be a multiple of 8 up to " +
                           std::to_string(kMaxRmsNormColumns) + ".");
  }
  for (const ffi::Error& error :
       {is_rows("residual", buffers.residual), is_rows("projected", buffers.projected),
        is_rows("sum", buffers.sum), is_rows("normed", buffers.normed),
        is_rows("result", buffers.result), is_scales("norm", buffers.norm),
        CheckType("hidden", buffers.hidden, TypeOf(p.lhs)),
        buffers.following_norm ? is_scales("following_norm", *buffers.following_norm)
                               : ffi::Error::Success()}) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error RunCpuBlock(ffi::ThreadPool pool, const Call& call) {
  std::optional<BlockBuffers> buffers;
  ffi::Error error = FindBuffers(call, &buffers);
  if (error.success()) error = CheckRows(*buffers, call.operands[0].problem);
  if (error.success()) error = CheckNoOverlap(*buffers, call.operands);
  if (error.failure() || call.operands[0].problem.m == 0) return error;
  const Activation activation = call.operands[1].problem.epilogue.activation;
  const float epsilon = call.attributes.Find<float>("epsilon").value_or(0);
  CpuBlock(*buffers, call.operands, activation, epsilon).Run(pool);
  return error;
}

}  // namespace jaxlowbit
