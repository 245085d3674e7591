// SPDX-License-Identifier: Apache-2.0

#include "cuda/dispatch.h"

#include <algorithm>

#include "cuda/qmm_sm80/config.h"

namespace jaxlowbit {
namespace {

int64_t WorkspaceBytes(const QuantizedMatmul& problem, int split_k) {
  return split_k * problem.batch * problem.m * CeilDiv(problem.out_columns(), kAtom) * kAtom *
         static_cast<int64_t>(sizeof(float));
}

// CTAs of a tile that one multiprocessor holds at a time.
int64_t ResidentCtas(const QuantizedMatmul& problem, const Device& device, int block_m) {
  constexpr int kReservedBytes = 1024;  // shared memory the system takes per CTA
  const int bytes = qmm_sm80::SharedBytes(
      block_m, problem.bits, problem.group_size, static_cast<int>(problem.scale_bytes()),
      static_cast<int>(problem.zero_bytes()), problem.transposed);
  return std::clamp(device.shared_bytes_per_sm / (bytes + kReservedBytes), 1,
                    qmm_sm80::CtasByRegisters(block_m, problem.transposed || problem.scale_sums));
}

// Time of a split of k, in stages of a CTA that has a multiprocessor to itself. The constants are
// fits to sweeps of split_k on an H200 (docs/kernels/qmm_sm80.md).
double Cost(const QuantizedMatmul& problem, const Device& device, int block_m, int split_k) {
  constexpr double kStart = 1;      // filling the ring
  constexpr double kShared = 0.54;  // of a stage's time, what CTAs beside each other cannot overlap
  constexpr double kReduce = 4;     // the kernel that adds the parts
  const int64_t tiles = CeilDiv(problem.m, block_m) *
                        CeilDiv(problem.out_columns(), qmm_sm80::BlockOut(problem.transposed)) *
                        problem.batch;
  const int64_t stages = CeilDiv(problem.lhs_columns(), qmm_sm80::BlockK(problem.bits));
  // The multiprocessor with the most CTAs is the last one to end.
  const int64_t ctas = CeilDiv(tiles * split_k, device.num_sms);
  const int64_t beside = std::min(ctas, ResidentCtas(problem, device, block_m));
  // Partial sums are 512 bytes per token, written and read, against 8 KiB of codes in a stage; they
  // stay in L2, at about twice the rate.
  const double sums = split_k > 1 ? block_m / 16.0 : 0;
  const double cta = static_cast<double>(CeilDiv(stages, split_k)) + kStart + sums;
  const double overlap = kShared + (1 - kShared) / static_cast<double>(beside);
  return static_cast<double>(ctas) * cta * overlap + (split_k > 1 ? kReduce : 0);
}

}  // namespace

std::string Unsupported(const QuantizedMatmul& problem, const Device& device) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  if (device.compute_capability < 80) {
    return "the kernels need compute capability 8.0, this device has " +
           number(device.compute_capability / 10) + "." + number(device.compute_capability % 10);
  }
  if (problem.bits != 4 && problem.bits != 8) {
    return "the kernels read 4 or 8 bits, the weight has " + number(problem.bits);
  }
  if (problem.lhs == ElementType::kF32) return "the kernels take bfloat16 or float16 lhs";
  if (problem.scale != ElementType::kF32 && problem.scale != problem.lhs) {
    return "the kernels take scales of the dtype of lhs or float32";
  }
  if (problem.scale_sums &&
      (problem.lhs != ElementType::kBf16 || problem.scale != ElementType::kF32 ||
       problem.zero == ZeroKind::kFloat || problem.transposed)) {
    return "scales multiply sums only with bfloat16 lhs, float32 scales and no float zero, not "
           "transposed";
  }
  if (problem.out != ElementType::kF32 && problem.out != problem.lhs) {
    return "the kernels write the dtype of lhs or float32";
  }
  constexpr int64_t kLargest = int64_t{1} << 30;  // 32-bit positions along k, and atoms along n
  if (problem.k > kLargest || problem.n > kLargest) {
    return "k=" + number(problem.k) + " or n=" + number(problem.n) + " is beyond 2^30";
  }
  return "";
}

Choice Select(const QuantizedMatmul& problem, const Device& device, int64_t workspace_bytes) {
  Choice choice;
  const bool large = problem.m > 32 && !problem.scale_sums;
  choice.block_m = large ? 64 : problem.m > 16 ? 32 : problem.m > 8 ? 16 : 8;
  const auto cost = [&](int split_k) { return Cost(problem, device, choice.block_m, split_k); };
  const int64_t stages = CeilDiv(problem.lhs_columns(), qmm_sm80::BlockK(problem.bits));
  const int most = static_cast<int>(std::min<int64_t>(kMaxSplitK, stages));
  for (int split_k = 2; split_k <= most; ++split_k) {
    if (WorkspaceBytes(problem, split_k) > workspace_bytes) break;
    if (cost(split_k) < cost(choice.split_k)) choice.split_k = split_k;
  }
  return choice;
}

}  // namespace jaxlowbit
