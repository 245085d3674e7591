// SPDX-License-Identifier: Apache-2.0
//
// The handler that XLA calls when a program is compiled or loaded, once for each call in it, one after the other. It
// starts to compile what the call will launch and does not wait, so that all calls compile at the same time. It gets
// attributes alone, so the call describes its products in one of them:
//
//   products  s64[kProductNumbers * products]; absent if the binary holds all kernels of the call, if sizes are not
//             known, or in programs of earlier versions
//
// and, if there are any, by its codebooks, as operands.h has them.
#include <vector>

#include "cuda/launch.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/operands.h"

namespace jaxlowbit {
namespace {

// A product in the numbers of _backends/call.py.
QuantizedMatmul ProductOf(const int64_t* numbers) {
  QuantizedMatmul p;
  p.batch = numbers[0], p.m = numbers[1], p.n = numbers[2], p.k = numbers[3];
  p.bits = static_cast<int>(numbers[4]);
  p.lhs = static_cast<ElementType>(numbers[6]);
  p.scale = static_cast<ElementType>(numbers[7]);
  p.group_size = GroupSize(numbers[5], p.k, p.scale);
  p.out = static_cast<ElementType>(numbers[8]);
  p.zero = static_cast<ZeroKind>(numbers[9]);
  p.permuted_parts = numbers[10];
  p.transposed = numbers[11] != 0;
  p.scale_sums = numbers[12] != 0;
  p.half_sums = numbers[13] != 0;
  p.epilogue.gated = numbers[14] != 0;
  p.num_weights = p.weights_per_element();
  return p;
}

bool IsPlausible(const int64_t* numbers) {
  const auto within = [&](int i, int64_t least, int64_t most) {
    return least <= numbers[i] && numbers[i] <= most;
  };
  constexpr int64_t kMost = int64_t{1} << 31;
  return within(0, 1, kMost) && within(1, 1, kMost) && within(2, 1, kMost) && within(3, 1, kMost) &&
         within(4, 1, 8) && within(6, 0, 5) && within(7, 0, 6) && within(8, 0, 7) &&
         within(9, 0, 2);
}

// The numbers of product i: those of its weight, or of all weights.
ffi::Span<const float> NumbersOf(ffi::Dictionary dictionary, size_t i, size_t products) {
  const auto numbers = dictionary.get<ffi::Span<const float>>("codebook");
  const auto sizes = dictionary.get<ffi::Span<const int64_t>>("codebook_sizes");
  if (!numbers.has_value()) return {};
  if (!sizes.has_value()) return *numbers;
  const Codebooks codebooks = {*numbers, *sizes};
  return codebooks.Check(products).failure() ? ffi::Span<const float>() : codebooks.Own(i);
}

// Whatever is wrong with the call, Initialize says.
ffi::Error Instantiate(ffi::Dictionary dictionary) {
  const ffi::Error ignored = Guard("jaxlowbit", [&] {
    const auto numbers = dictionary.get<ffi::Span<const int64_t>>("products");
    if (!numbers.has_value()) return ffi::Error::Success();
    std::vector<QuantizedMatmul> problems;
    for (size_t i = 0; i + kProductNumbers <= numbers->size(); i += kProductNumbers) {
      const int64_t* own = numbers->begin() + i;
      if (!IsPlausible(own)) return ffi::Error::Success();
      problems.push_back(ProductOf(own));
      const auto codebook =
          NumbersOf(dictionary, problems.size() - 1, numbers->size() / kProductNumbers);
      QuantizedMatmul& p = problems.back();
      if (codebook.size() == size_t{1} << p.bits) p.codebook = CodebookOf(codebook.begin(), p.bits);
    }
    StartCompiling(problems);
    return ffi::Error::Success();
  });
  static_cast<void>(ignored);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxlowbitCudaInstantiate, jaxlowbit::Instantiate,
    xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInstantiate>().Attrs());
