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
    Turned turned(p_);
#pragma unroll 1
    for (int layer = 0; layer < p_.layers; ++layer) {
#pragma unroll 1
      for (int step = 0; step < kWalkSteps; ++step, turned.Next()) {
        const Units units(p_, step, turned.value());
        number_ = layer * kWalkSteps + step;
        const int count = units.count();
#pragma unroll 1
        for (int i = 0; i < count; ++i) Collect(units.product, units.At(i), layer);
      }
    }
  }

 private:
  static constexpr int kFragmentBytes = Consumer<I>::kFragmentBytes;
  static constexpr float kUnit = 1 << kShift<T>;  // of sums

  // This lane's two neighbouring channels of a row; several lanes add different senders of the same.
  struct Place {
    bool whole, gated;
    int lane;
    __device__ int pairs_log() const { return whole ? 4 : 3; }
    __device__ int outs_log() const { return pairs_log() + I::kRows - 1; }
    __device__ int pair() const { return lane & ((1 << pairs_log()) - 1); }
    __device__ int row() const { return I::kRows == 1 ? 0 : lane >> pairs_log() & 1; }
    __device__ int part() const { return lane >> outs_log(); }
  };

  __device__ void Collect(const Product& product, const Unit& unit, int layer) {
    const Place place = {unit.half < 0, product.second > 0, lane_};
    const int buffer = units_ % 2, parity = units_ / 2 % 2;
    const uint32_t barrier = memory_.partials_full(buffer);
    if (lane_ == 0 && !watch_.stopped()) {
      ArriveExpecting(barrier, I::kGroups == 2 || place.gated ? 2 * kPartBytes : kPartBytes);
    }
    const int column =
        unit.strip * 32 + (place.whole ? rank_ * 16 : unit.half * 16 + rank_ * 8);  // in pairs
    const int entry = place.row() * product.out_row + column + place.pair();
    const uint32_t residual = LoadResidual(product, entry, layer);
    Record(kStampExpected);
    // Sums came by st.async, as copies do: an acquire of the cluster would empty the L1 cache of the multiprocessor.
    watch_.Barrier(kForPartials, number_, barrier, parity);
    Record(kStampPartials);
    float sums[2][2] = {};
    Add(PartialsAt(p_, memory_, buffer, 0), place, sums);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sums[0][j] = place.gated
                       ? TimesSigmoid(SigmoidFormOf(Activation::kSilu), sums[0][j]) * sums[1][j]
                       : sums[0][j] + sums[1][j];
    }
    // Rounded before the sum too, as separate kernels do.
    uint32_t both = Pair<T>::Round(sums[0][0], sums[0][1]);
    both = Pair<T>::Round(Pair<T>::Low(both) + Pair<T>::Low(residual),
                          Pair<T>::High(both) + Pair<T>::High(residual));
    const bool stores = place.part() == 0;
    if (stores && product.out != nullptr) {
      StoreRelaxed(product.out + entry, static_cast<uint64_t>(p_.epoch + layer) << 32 | both);
    }
    Record(kStampStored);
    __syncwarp();
    if (lane_ < 2 && !watch_.stopped()) {
      ArriveRemoteAfterReads(MapToRank(memory_.partials_free(buffer), lane_), true);
    }
    if (lane_ == 0 && product.count != nullptr) AddRelaxed(product.count, 1);
    const Part& part = product.PartOf(unit.strip);
    if (part.out != nullptr && stores) {
      const int64_t row = int64_t{layer} * I::kRows + place.row();
      const int64_t at = row * part.row + column + place.pair() - part.first * 32;
      reinterpret_cast<uint32_t*>(part.out)[at] = both;
    }
    ++units_;
  }

  __device__ void Record(WalkStamp stamp) const {
    if (I::kStamps && lane_ == 0) Stamp<I>(p_, number_, stamp, Clock());
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

  // Adds the sums of the senders of both parts of a buffer, for this lane's two channels. The parts are the gate's and
  // up's strip, or half of the senders of a strip.
  __device__ void Add(uint32_t partials, const Place& place, float (&sums)[2][2]) const {
    constexpr int kSenders = 4 * I::kRows;  // of a part, for a lane
    const int stride = place.whole ? 2 * kFragmentBytes : kFragmentBytes;
    const int channel = place.pair() * 2 % kSliceRows;
    const uint32_t first = partials + place.pair() * 2 / kSliceRows * kFragmentBytes +
                           channel % 8 * 16 + channel / 8 * 8 + place.row() * 4 +
                           place.part() * stride;
    const int step = stride << (5 - place.outs_log());  // to the lane's next sender
    const int parts = I::kGroups == 2 || place.gated ? 2 : 1;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (I::kGroups == 1 && part == parts) break;
#pragma unroll
      for (int i = 0; i < kSenders; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t at = first + i * step + part * kPartBytes + j * 16;
          sums[part][j] += __uint_as_float(LoadShared4(at));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float own = sums[part][j];
        const float two = own + __shfl_xor_sync(~0u, own, 16);
        const float four = two + __shfl_xor_sync(~0u, two, 8);
        const float sum = place.outs_log() == 5 ? own : place.outs_log() == 4 ? two : four;
        sums[part][j] = kUnit * sum;
      }
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
