// SPDX-License-Identifier: Apache-2.0
//
// The CPU handler of what lies between two attentions of a transformer (block_operands.h): threads go through its
// products together, and wait for each other between them.
#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/qmm_cpu.h"
#include "cpu/tuning.h"
#include "xla_ffi/block_operands.h"
#include "xla_ffi/cpu_team.h"
#include "xla_ffi/handlers.h"

namespace jaxlowbit {
namespace {

constexpr int64_t kRowsPerTask = kPermutedRows;
constexpr int64_t kLine = sizeof(CacheLine) / sizeof(float);

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
    if (products.size() > kWeights) {
      finished_.scale_type = *FloatType(buffers.following_norm.element_type());
      finished_.scales = buffers.following_norm.untyped_data();
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
    // A task also permutes its rows for the products that follow.
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

  // The product before may have permuted the same rows, of what has as many columns. Later ones do so anew.
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

// Results that are written while operands are still read lie apart from those. What Python lowers has results in
// buffers of their own.
ffi::Error CheckApart(const BlockBuffers& b, const std::vector<Operands>& products) {
  std::vector<Extent> read = {ExtentOf(b.residual), ExtentOf(b.norm), ExtentOf(b.following_norm),
                              ExtentOf(b.attended)};
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
      return Refuse(
          "a result lies over an operand of the call; put jax.lax.optimization_barrier around the "
          "results.");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer attended, ffi::AnyBuffer residual,
                   ffi::AnyBuffer norm, ffi::AnyBuffer following_norm, ffi::RemainingArgs weights,
                   ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> projected,
                   ffi::Result<ffi::AnyBuffer> sum, ffi::Result<ffi::AnyBuffer> normed,
                   ffi::Result<ffi::AnyBuffer> hidden, ffi::Result<ffi::Buffer<ffi::U8>>,
                   ffi::RemainingRets following, ffi::Dictionary dictionary) {
  return Guard("quantized_block", [&] {
    Attributes attributes(dictionary);
    const auto bits = attributes.Get<ffi::Span<const int64_t>>("bits");
    const auto group_size = attributes.Get<ffi::Span<const int64_t>>("group_size");
    const auto codebooks = Codebooks::Of(&attributes);
    const auto name = attributes.Get<std::string_view>("activation");
    const auto epsilon = attributes.Get<float>("epsilon");
    const BlockBuffers buffers = {attended,   residual, norm,    following_norm, *result,
                                  *projected, *sum,     *normed, *hidden};
    std::vector<Operands> products;
    Activation activation;
    ffi::Error error = attributes.Check();
    if (error.success()) error = DecodeActivation(name, &activation);
    if (error.success()) {
      error = DecodeProducts(buffers, {weights, 0, following, 0}, bits, group_size, codebooks,
                             &products);
    }
    for (const Operands& product : products) {
      if (error.success() && product.problem.scale == ElementType::kSuper) {
        error = Refuse(std::string(kNoSuperBlocks));
      }
    }
    if (error.success()) error = CheckRows(buffers, following.size() > 0, products[0].problem);
    if (error.success()) error = CheckApart(buffers, products);
    if (error.success() && products[0].problem.m > 0) {
      CpuBlock(buffers, products, activation, epsilon).Run(pool);
    }
    return error;
  });
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitCpuBlockExecute, jaxlowbit::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()             // attended
                                  .Arg<xla::ffi::AnyBuffer>()             // residual
                                  .Arg<xla::ffi::AnyBuffer>()             // norm
                                  .Arg<xla::ffi::AnyBuffer>()             // following_norm
                                  .RemainingArgs()                        // weights
                                  .Ret<xla::ffi::AnyBuffer>()             // result
                                  .Ret<xla::ffi::AnyBuffer>()             // projected
                                  .Ret<xla::ffi::AnyBuffer>()             // sum
                                  .Ret<xla::ffi::AnyBuffer>()             // normed
                                  .Ret<xla::ffi::AnyBuffer>()             // hidden
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
                                  .RemainingRets()                        // following
                                  .Attrs());
