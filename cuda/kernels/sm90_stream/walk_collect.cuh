// SPDX-License-Identifier: Apache-2.0
//
// The walk's collector warp: adds the partial sums of a unit from both CTAs in the order of senders, applies the epilogue
// and stores entries with their epoch.
#pragma once

#include "cuda/device/dequant.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/kernels/epilogue.cuh"
#include "cuda/kernels/sm90_stream/walk_multiply.cuh"

namespace jaxlowbit::sm90_stream::walk {

template <class I>
class Collector {
 public:
  __device__ Collector(const Params& p, Memory memory)
      : p_(p),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(ClusterRank()),
        watch_(p) {}

  __device__ void CollectAll() {
    WaitForPreviousKernels();
    for (int layer = 0; layer < p_.layers; ++layer) {
      for (int step = 0; step < kWalkSteps; ++step) {
        const Units units(p_, layer, step);
        number_ = layer * kWalkSteps + step;
        for (int i = 0; i < units.count(); ++i) Collect(units, units.At(i), layer);
        if (I::kStamps && lane_ == 0 && units.count() > 0) {
          Stamp<I>(p_, number_, kStampStored, Clock());
        }
      }
    }
  }

 private:
  static constexpr int kFragmentBytes = Consumer<I>::kFragmentBytes;
  static constexpr float kUnit = 1 << kShift<T>;  // of sums

  // This lane's two neighbouring channels of a row; several lanes add different senders of the same.
  struct Place {
    int pair, row, part, parts;
  };

  __device__ void Collect(const Units& units, const Unit& unit, int layer) {
    const Product& product = units.product;
    const bool whole = unit.half < 0;
    const int pairs = whole ? 16 : 8, outs = pairs * I::kRows;
    const Place place = {lane_ % pairs, lane_ / pairs % I::kRows, lane_ / outs, 32 / outs};
    const int buffer = units_ % 2;
    const uint32_t barrier = memory_.partials_full(buffer);
    if (lane_ == 0 && !watch_.stopped()) {
      ArriveExpecting(barrier, units.strips() * I::kPartBytes);
    }
    const int column = unit.strip * 32 + (whole ? rank_ * 16 : unit.half * 16 + rank_ * 8);
    const int entry = place.row * product.out_row + column + place.pair;  // columns in pairs
    const uint32_t residual = LoadResidual(product, entry, layer);
    const int parity = units_ / 2 % 2;
    watch_.Until(kForPartials, number_, [=] { return TryWaitForCluster(barrier, parity); });
    float values[2], up[2];
    Add(PartialsAt<I>(p_, memory_, buffer, 0), whole, place, values);
    if (product.second > 0) {
      Add(PartialsAt<I>(p_, memory_, buffer, 1), whole, place, up);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        values[j] = TimesSigmoid(SigmoidFormOf(Activation::kSilu), values[j]) * up[j];
      }
    }
    // Rounded before the sum too, as separate kernels do.
    uint32_t both = Pair<T>::Round(values[0], values[1]);
    both = Pair<T>::Round(Pair<T>::Low(both) + Pair<T>::Low(residual),
                          Pair<T>::High(both) + Pair<T>::High(residual));
    if (place.part == 0 && product.out != nullptr) {
      StoreRelaxed(product.out + entry, static_cast<uint64_t>(p_.epoch + layer) << 32 | both);
    }
    __syncwarp();
    if (lane_ < 2 && !watch_.stopped()) {
      ArriveRemoteAfterReads(MapToRank(memory_.partials_free(buffer), lane_), true);
    }
    if (lane_ == 0 && product.count != nullptr) AddRelaxed(product.count, 1);
    const Part& part = product.PartOf(unit.strip);
    if (part.out != nullptr && place.part == 0) {
      const int64_t row = int64_t{layer} * I::kRows + place.row;
      const int64_t at = row * part.row + column + place.pair - part.first * 32;
      reinterpret_cast<uint32_t*>(part.out)[at] = both;
    }
    ++units_;
  }

  __device__ uint32_t LoadResidual(const Product& product, int entry, int layer) {
    if (product.plain_residual != nullptr) return product.plain_residual[entry];
    if (product.residual == nullptr) return 0;
    const uint32_t epoch = p_.epoch + layer + product.residual_epoch;
    uint64_t value = 0;
    watch_.Until(kForResidual, number_, [&] {
      value = LoadRelaxed(product.residual + entry);
      return static_cast<uint32_t>(value >> 32) == epoch || !p_.waits;
    });
    return static_cast<uint32_t>(value);
  }

  // Adds the sums of all senders, for this lane's two channels.
  __device__ void Add(uint32_t partials, bool whole, const Place& place, float (&values)[2]) const {
    const int senders = (whole ? 8 : 16) * I::kGroups;
    const int stride = whole ? 2 * kFragmentBytes : kFragmentBytes;
    const int channel = place.pair * 2 % kSliceRows;
    const uint32_t first = partials + place.pair * 2 / kSliceRows * kFragmentBytes +
                           channel % 8 * 16 + channel / 8 * 8 + place.row * 4;
    values[0] = values[1] = 0;
#pragma unroll 8
    for (int sender = place.part; sender < senders; sender += place.parts) {
      values[0] += __uint_as_float(LoadShared4(first + sender * stride));
      values[1] += __uint_as_float(LoadShared4(first + sender * stride + 16));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      for (int lanes = 16; lanes >= 32 / place.parts; lanes /= 2) {
        values[j] += __shfl_xor_sync(~0u, values[j], lanes);
      }
      values[j] *= kUnit;
    }
  }

  const Params& p_;
  const Memory memory_;
  const int lane_, rank_;
  Watch watch_;
  int units_ = 0;  // collected before
  int number_ = 0;
};

}  // namespace jaxlowbit::sm90_stream::walk
