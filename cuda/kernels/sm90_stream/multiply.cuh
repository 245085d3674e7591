// SPDX-License-Identifier: Apache-2.0
//
// Consumer warps: shared memory to accumulators. A warp multiplies two slices of channels by its atoms of a stage:
// ldmatrix of lhs fragments, dequantization in registers, mma.
#pragma once

#include <type_traits>

#include "cuda/device/mma.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::sm90_stream {

// Accumulators of a slice.
template <class I>
using SumsOf = float[I::kTiles][4];
template <class I>
using Accumulators = SumsOf<I>[kSlicesPerWarp];

// Row types: Any supports all scales; Fastest is faster and may support fewer.
template <typename T, typename S, class I, Codebook kCodebook>
struct RowsOf {
  static constexpr int kDown = kCodebookShift<T, S, kCodebook>, kBits = I::kBits;
  using Any =
      std::conditional_t<I::kScaleAccumulators, NumberSumsRowPair<T, S, kBits, kCodebook, kDown>,
                         typename CodebookRows<T, S, kBits, kCodebook, kDown>::type>;
  using Fastest =
      std::conditional_t<!I::kScaleAccumulators && Fusing<T, S, kCodebook, kDown>::kSupportsSome &&
                             !Fusing<T, S, kCodebook, kDown>::kSupportsAll,
                         FusedNumberRowPair<T, S, kBits, kCodebook, kDown>, Any>;
};

template <typename T, typename S, class I>
struct RowsOf<T, S, I, Codebook::kNone> {
  using Any = std::conditional_t<I::kScaleAccumulators, IntegerRowPair<T, S, I::kBits>,
                                 ScaledRowPair<T, S, I::kBits>>;
  using Fastest = std::conditional_t<!I::kScaleAccumulators && I::kZero != ZeroKind::kInteger &&
                                         kCanFuse<T, I::kBits> && std::is_same_v<S, T>,
                                     FusedRowPair<T, I::kBits>, Any>;
};

template <typename T, class I>
struct RowsOf<T, Super, I, Codebook::kNone> {
  using Any = SuperRowPair<T, I::kBits>;
  using Fastest = Any;
};

template <class I>
using Rows = typename RowsOf<typename I::T, typename I::S, I, I::kCodebook>::Any;

// Rows that dequantize to the same weights in fewer instructions, for groups of 32 or more and scales that they
// support.
template <class I>
using FastestRows = typename RowsOf<typename I::T, typename I::S, I, I::kCodebook>::Fastest;

// The table is a base class so that it is empty for other codebooks.
template <class I>
class StageMultiplier : Table<I::kCodebook> {
 public:
  using T = typename I::T;
  using S = typename I::S;
  static constexpr int kBits = I::kBits;

  // `part`: this warp's part of the atoms of a stage.
  __device__ StageMultiplier(const Params& p, int part, int lane)
      : Table<I::kCodebook>(p.table), p_(p), atom_(Opaque(part * p.plan.warp_atoms)), lane_(lane) {
    // ldmatrix: lane i passes row i % 8 of matrix i / 8, which is k half i / 8 % 2 of row tile i / 16 or, with a single
    // row tile, of step i / 16.
    int row = (kUnroll == 1 ? 0 : lane_ / 16 * 8) + lane_ % 8;
    const int column = lane_ / 8 % (4 / kUnroll);
    if (kPartialTile) row = min(row, p_.plan.lhs_rows - 1);
    const int place = atom_ * LhsBytes() + row * kRowBytes + (column ^ row % 8) * kCopyBytes;
    lhs_ = Opaque(kKeepsOffset ? place : row);
  }

  // Starts a tile of `slices` slices from slice `tile` on. `own`: index in the tile of the warp's first slice.
  __device__ void StartTile(int tile, int own, int slices) {
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      // With an odd number of slices the last warp multiplies its first slice twice.
      const int slice = tile + TileSlice(p_, min(own + i, slices - 1));
      const int strip = slice / kSlicesPerStrip;
      // The part of a strip in the tile is stored [atom][slice].
      const int begin = max(tile, strip * kSlicesPerStrip);
      const int end = min(tile + slices, (strip + 1) * kSlicesPerStrip);
      const int atom_bytes = (end - begin) * I::kSliceBytes;
      packed_[i] = Opaque(
          p_.plan.bytes.lhs + (begin - tile) * (I::kSliceBytes << p_.plan.stage_shift) +
          FirstPlane<kBits>((slice - begin) * 32) + atom_ * atom_bytes + FirstPlane<kBits>(lane_));
      if constexpr (!I::kWholeStrips) packed_step_[i] = Opaque(atom_bytes);
      const int lane = (slice - begin) * 32 + lane_;
      if constexpr (kPlanes > 1) {
        others_[0][i] = Opaque(SecondPlane<kBits>(lane) - FirstPlane<kBits>(lane));
      }
      if constexpr (kPlanes > 2) {
        others_[1][i] = Opaque(ThirdPlane<kBits>(lane) - FirstPlane<kBits>(lane));
      }
      const int group =
          (strip - tile / kSlicesPerStrip) * p_.plan.stage_groups + FirstScaleRow<I>(p_, atom_);
      const int row = group * kRows + slice % kSlicesPerStrip * kSliceRows + lane_ / 4 * 2;
      scales_[i] =
          Opaque(p_.plan.bytes.lhs + p_.plan.bytes.packed + row * static_cast<int>(sizeof(S)));
    }
  }

  // Bytes of lhs per atom.
  __device__ int LhsBytes() const {
    return (kPartialTile ? p_.plan.lhs_rows : I::kTiles * 8) * kRowBytes;
  }

  // Multiplies this warp's atoms of a stage. `left`: atoms left along k, this stage included.
  __device__ void Multiply(uint32_t stage, uint32_t activations, int left,
                           Accumulators<I>& acc) const {
    const int own = min(p_.plan.warp_atoms, left - atom_);
    if constexpr (I::kHasOneRow) {
      if (p_.m == 1) {
#pragma unroll 1
        for (int at = 0; at < own;) {
          const bool paired = kUnrolledAtoms == 2 && at + 2 <= own;
          if (paired) {
            MultiplyOneRow<kUnrolledAtoms>(stage, activations, at, acc);
          } else {
            MultiplyOneRow<1>(stage, activations, at, acc);
          }
          at += paired ? 2 : 1;
        }
        return;
      }
    }
    if constexpr (kMicroGroups > 0) {
      if (own == 2 && p_.groups_per_atom == kMicroGroups &&
          MultiplyMicroscaled(stage, activations, acc)) {
        return;
      }
    }
    if (kUnrolledAtoms == 2 && own == 2 && p_.atom_step == 0 && SupportsFastest<1>(stage, 0)) {
      MultiplyAtoms<FastestRows<I>, 2, 1>(stage, activations, 0, acc);
      return;
    }
    if (kMaxAtoms == 4 && own == 4 && p_.atom_step == 0 && SupportsFastest<1>(stage, 0) &&
        SupportsFastest<1>(stage, 2)) {
      MultiplyAtoms<FastestRows<I>, 2, 1>(stage, activations, 0, acc);
      MultiplyAtoms<FastestRows<I>, 2, 1>(stage, activations, 2, acc);
      return;
    }
#pragma unroll 1
    for (int at = 0; at < own; ++at) {
      if (p_.groups_per_atom == 1 && SupportsFastest<1>(stage, at)) {
        MultiplyAtoms<FastestRows<I>, 1, 1>(stage, activations, at, acc);
      } else if (p_.groups_per_atom == 2 && SupportsFastest<2>(stage, at)) {
        MultiplyAtoms<FastestRows<I>, 1, 2>(stage, activations, at, acc);
      } else if constexpr (I::kSuperBlocks) {
        MultiplyAtoms<Rows<I>, 1, 4>(stage, activations, at, acc);
      } else {
        MultiplyAtoms<Rows<I>, 1, 0>(stage, activations, at, acc);
      }
    }
  }

  // Sums the columns of MultiplyOneRow's result.
  __device__ static void SumColumns(Accumulators<I>& acc) {
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = acc[i][0][2 * h] + acc[i][0][2 * h + 1];
        sum += __shfl_xor_sync(~0u, sum, 1);
        acc[i][0][2 * h] = sum + __shfl_xor_sync(~0u, sum, 2);
      }
    }
  }

 private:
  using SliceSums = SumsOf<I>;

  static constexpr bool kPartialTile = I::kTiles == 1;
  static constexpr int kPlanes = kNumPlanes<kBits>, kOthers = kPlanes > 2 ? 2 : 1;
  // Whether a lane keeps its lhs offset in a register or recomputes it for every atom; the faster one by measurement
  // (docs/measurements/qmm_sm90_stream.md).
  static constexpr bool kKeepsOffset =
      I::kTiles != 2 || I::kCtasPerSm != 2 || I::kZero != ZeroKind::kNone;
  // One load of fragments covers two row tiles of one step or, with a single tile, two steps.
  static constexpr int kUnroll = I::kTiles == 1 ? 1 : 2;
  static constexpr int kRows = kAtom;  // per group
  static constexpr int kMaxAtoms = MaxWarpAtoms(kBits, I::kTiles * 8);
  // Atoms and slices multiplied together, so that instructions overlap: two of each if registers allow.
  static constexpr int kUnrolledAtoms = I::kTiles <= 2 && kBits <= 4 ? 2 : 1;
  static constexpr int kUnrolledSlices = I::kTiles <= 2 || I::kCtasPerSm == 1 ? kSlicesPerWarp : 1;

  // Groups per atom in microscaling formats that multiply two atoms together; 0 in other formats.
  static constexpr bool kMicroscaled =
      kNeedsFactor<I::kCodebook> && kUnrolledAtoms == 2 && kIsExact<T, S>;
  static constexpr int kMicroGroups = kMicroscaled ? kMicroGroupsOf<S> : 0;
  static constexpr int kLanesOfRow = 4;

  struct NoFactors {};
  // Pairs of factors of rows g and g + 8 in two atoms. Each of the four lanes of a row keeps the factors of every
  // fourth group.
  struct MicroFactors {
    uint32_t of[kSlicesPerWarp][kMicroGroups == 4 ? 2 : 1];
  };

  // Multiplies two atoms in groups of 32 or 16. The lanes of a row load and convert the scales of different groups and
  // exchange them by shuffles. Does nothing and returns false if a scale is too large.
  __device__ bool MultiplyMicroscaled(uint32_t stage, uint32_t activations,
                                      Accumulators<I>& acc) const {
    using R = FusedNumberRowPair<T, S, kBits, I::kCodebook, kCodebookShift<T, S, I::kCodebook>>;
    constexpr bool kSupportsAll =
        Fusing<T, S, I::kCodebook, kCodebookShift<T, S, I::kCodebook>>::kSupportsAll;
    MicroFactors factors;
    bool supported = true;
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kMicroGroups / kLanesOfRow; ++j) {
        const int group = j * kLanesOfRow + lane_ % kLanesOfRow;
        const uint32_t scales = LoadScalePair<S>(ScaleAddress(stage, i, group * kRows));
        if constexpr (!kSupportsAll) supported &= R::SupportsScales(scales);
        factors.of[i][j] = R::FactorsOf(scales);
      }
    }
    if (!kSupportsAll && !__all_sync(~0u, supported)) return false;
    MultiplyAtoms<R, 2, kMicroGroups>(stage, activations, 0, acc, factors);
    return true;
  }

  // Multiplies kAtoms atoms by a single row of lhs, with two-level scales. Column j of the 8 in the mma contains the
  // row in group j and zeros elsewhere, so the sums of up to 8 groups are in separate columns, and each lane scales its
  // two columns once.
  template <int kAtoms>
  __device__ void MultiplyOneRow(uint32_t stage, uint32_t activations, int at,
                                 Accumulators<I>& acc) const {
    using R = Rows<I>;
    const int shift = p_.group_shift, first_step = lane_ / 4 << shift;
    const int groups = max(kAtoms * kStepsPerAtom >> shift, 1);
    const uint32_t first = activations + lhs_ + at * LhsBytes();
    R rows[kSlicesPerWarp];
    uint32_t packed[kAtoms][kSlicesPerWarp][kBits];
    float part[kAtoms][kSlicesPerWarp][4] = {}, lhs_sums[4] = {};
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      rows[i].Start(false);
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        LoadWords(stage, i, at + a, packed[a][i]);
      }
    }
    uint32_t fragments[kAtoms][4];
#pragma unroll
    for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        if (step % 2 == 0) {
          LoadMatrices(fragments[a], (first + a * LhsBytes()) ^ (step * 2 * kCopyBytes));
        }
        const bool own = (a * kStepsPerAtom + step - first_step) >> shift == 0;
        const uint32_t low = own ? fragments[a][step % 2 * 2] : 0;
        const uint32_t high = own ? fragments[a][step % 2 * 2 + 1] : 0;
#pragma unroll
        for (int i = 0; i < kSlicesPerWarp; ++i) {
          uint32_t weights[4];
          rows[i].Dequantize(packed[a][i], step, weights);
          Mma<T>(part[a][i], weights, low, high);
        }
        if constexpr (I::kSumsLhs) {
          const uint32_t ones[4] = {R::kOnes, R::kOnes, R::kOnes, R::kOnes};
          Mma<T>(lhs_sums, ones, low, high);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSlicesPerWarp; ++i) {
      if constexpr (kAtoms == 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j) part[0][i][j] += part[1][i][j];
      }
      LoadSuperFloats(stage, i, rows[i]);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        // Columns after the last group are zeros; their scale does not matter.
        const int group = min(lane_ % 4 * 2 + column, groups - 1);
        LoadRows(stage, i, RowsAt(at) + group * kRows, rows[i]);
        rows[i].template AddColumn<I::kSumsLhs>(column, part[0][i], lhs_sums, acc[i][0]);
      }
    }
  }

  // Whether FastestRows support the scales of both slices in the kGroups groups of the warp's atom `at`.
  template <int kGroups>
  __device__ bool SupportsFastest(uint32_t stage, int at) const {
    if constexpr (std::is_same_v<FastestRows<I>, Rows<I>>) {
      return true;
    } else {
      bool supported = true;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kSlicesPerWarp; ++i) {
          supported &= FastestRows<I>::SupportsScales(
              LoadScalePair<S>(ScaleAddress(stage, i, RowsAt(at) + group * kRows)));
        }
      }
      return __all_sync(~0u, supported);
    }
  }

  // Number of independent accumulators for kAtoms atoms. With one row tile, one per atom, to shorten dependency chains
  // of mma; below 4 bits, scaling the additional partial sums would take longer.
  template <int kAtoms>
  static constexpr int kChainsOf = I::kTiles == 1 && kBits >= 4 ? kAtoms : 1;

  // Multiplies kAtoms atoms of the warp, beginning with `at`, in kGroups groups. kGroups = 0: one atom with a number of
  // groups known at run time. With factors, kGroups counts the groups per atom.
  template <class R, int kAtoms, int kGroups, class Factors = NoFactors>
  __device__ void MultiplyAtoms(uint32_t stage, uint32_t activations, int at, Accumulators<I>& acc,
                                const Factors& factors = {}) const {
    constexpr bool kHasFactors = !std::is_same_v<Factors, NoFactors>;
    static_assert(kAtoms == 1 || kGroups == 1 || kHasFactors);
    constexpr int kRowAtoms = kHasFactors ? kAtoms : 1;
    const int groups = kGroups == 0 ? p_.groups_per_atom : kGroups;
    const uint32_t first = kKeepsOffset ? activations + lhs_ + at * LhsBytes() : 0;
    constexpr int kChains = kChainsOf<kAtoms>;
    // With scaled weights too, the second atom has its own accumulators.
    constexpr bool kSecondChain = kHasFactors && kChains == 2;
#pragma unroll
    for (int slice = 0; slice < kSlicesPerWarp; slice += kUnrolledSlices) {
      R rows[kRowAtoms][kUnrolledSlices];
      uint32_t packed[kAtoms][kUnrolledSlices][kBits];
      SliceSums part[kChains][kUnrolledSlices] = {};
      SliceSums lhs_sums = {};  // over a group, for zeros
#pragma unroll
      for (int i = 0; i < kUnrolledSlices; ++i) {
        if constexpr (!kHasFactors) LoadFirstRows(stage, slice + i, at, rows[0][i]);
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) LoadWords(stage, slice + i, at + a, packed[a][i]);
      }
      uint32_t fragments[kAtoms][4];
#pragma unroll
      for (int step = 0; step < kStepsPerAtom; ++step) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) {
          if constexpr (kHasFactors) {
            if (step * groups % kStepsPerAtom == 0) {
              UseFactors(factors, slice, a * kGroups + step * kGroups / kStepsPerAtom, rows[a]);
            }
          } else if (kGroups != 1 && step > 0 && step * groups % kStepsPerAtom == 0) {
            const int group = step * groups / kStepsPerAtom;  // of the atom
#pragma unroll
            for (int i = 0; i < kUnrolledSlices; ++i) {
              AddPart(rows[0][i], part[0][i], lhs_sums, acc[slice + i]);
              LoadRows(stage, slice + i, RowsAt(at) + group * kRows, rows[0][i]);
            }
            Clear(lhs_sums);
          }
          uint32_t weights[kUnrolledSlices][4];
#pragma unroll
          for (int i = 0; i < kUnrolledSlices; ++i) {
            rows[a % kRowAtoms][i].Dequantize(packed[a][i], step, weights[i]);
          }
          // A step is two columns; the swizzle XORs column numbers.
          const uint32_t lhs =
              kKeepsOffset ? first + a * LhsBytes() : activations + PlaceOf(at + a);
          const uint32_t column = lhs ^ (step * 2 * kCopyBytes);
          SliceSums* sums =
              I::kScaleAccumulators || (kSecondChain && a == 1) ? part[a % kChains] : &acc[slice];
          MultiplyStep<R>(column, step, weights, fragments[a], sums, lhs_sums);
        }
      }
      if constexpr (kSecondChain) {
        AddSecondChain(part[1], &acc[slice]);
      } else {
        AddChains(rows[0], part, lhs_sums, &acc[slice]);
      }
    }
  }

  // Sets `rows` to a group. One lane of each row has the group's factors.
  template <class R, class Factors>
  __device__ static void UseFactors(const Factors& factors, int slice, int group,
                                    R (&rows)[kUnrolledSlices]) {
#pragma unroll
    for (int i = 0; i < kUnrolledSlices; ++i) {
      rows[i].Use(__shfl_sync(~0u, factors.of[slice + i][group / kLanesOfRow], group % kLanesOfRow,
                              kLanesOfRow));
    }
  }

  // Starts the rows of a slice with the scales of the first group of the warp's atom `at`.
  template <class R>
  __device__ void LoadFirstRows(uint32_t stage, int slice, int at, R& rows) const {
    StartRows<R, I::kCodebook>(I::kZero == ZeroKind::kFloat, *this, rows);
    if constexpr (I::kSuperBlocks) LoadSuperFloats(stage, slice, rows);
    LoadRows(stage, slice, RowsAt(at), rows);
  }

  // Adds the partial sums of the last group in all chains, and its zeros once.
  template <class R, int kChains>
  __device__ static void AddChains(const R (&rows)[kUnrolledSlices],
                                   SliceSums (&part)[kChains][kUnrolledSlices], SliceSums& lhs_sums,
                                   SliceSums* sums) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
      for (int i = 0; i < kUnrolledSlices; ++i) AddPart(rows[i], part[chain][i], lhs_sums, sums[i]);
      Clear(lhs_sums);
    }
  }

  // Adds the accumulators of the second atom.
  __device__ static void AddSecondChain(const SliceSums (&chain)[kUnrolledSlices],
                                        SliceSums* sums) {
#pragma unroll
    for (int i = 0; i < kUnrolledSlices; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][0][j] += chain[i][0][j];
    }
  }

  // Multiplies all rows by the weights of a step and adds to `sums` of each slice. `column`: this lane's lhs address.
  template <class R>
  __device__ static void MultiplyStep(uint32_t column, int step,
                                      const uint32_t (&weights)[kUnrolledSlices][4],
                                      uint32_t (&fragments)[4], SliceSums* sums,
                                      SliceSums& lhs_sums) {
#pragma unroll
    for (int tile = 0; tile < I::kTiles; tile += kUnroll) {
      if (kUnroll == 2 || step % 2 == 0) LoadMatrices(fragments, column + tile * 8 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int half = kUnroll == 2 ? j : step % 2;
#pragma unroll
        for (int i = 0; i < kUnrolledSlices; ++i) {
          Mma<T>(sums[i][tile + j], weights[i], fragments[2 * half], fragments[2 * half + 1]);
        }
        if constexpr (I::kSumsLhs) {
          static_assert(kUnrolledSlices == kSlicesPerWarp);
          const uint32_t ones[4] = {R::kOnes, R::kOnes, R::kOnes, R::kOnes};
          Mma<T>(lhs_sums[tile + j], ones, fragments[2 * half], fragments[2 * half + 1]);
        }
      }
    }
  }

  // Offset of the first group of the warp's atom `at`, in rows from its first group.
  __device__ int RowsAt(int at) const {
    return at * p_.atom_step + (kMaxAtoms == 4 ? at / 2 * p_.pair_step : 0);
  }

  // Loads this lane's packed words of a slice of the warp's atom `at`.
  __device__ void LoadWords(uint32_t stage, int slice, int at, uint32_t (&packed)[kBits]) const {
    const uint32_t first = stage + packed_[slice] + at * PackedStep(slice);
    LoadPacked<kBits>(first, kPlanes > 1 ? first + others_[0][slice] : 0,
                      kPlanes > 2 ? first + others_[kOthers - 1][slice] : 0, lane_, packed);
  }

  // Bytes between a slice's packed weights in consecutive atoms.
  __device__ int PackedStep(int slice) const {
    return I::kWholeStrips ? kSlicesPerStrip * I::kSliceBytes : packed_step_[slice];
  }

  // Adds the scaled partial sums of a group, which it clears, and the zeros times the sums of lhs over the group.
  template <class R>
  __device__ static void AddPart(const R& rows, float (&part)[I::kTiles][4],
                                 const float (&lhs_sums)[I::kTiles][4],
                                 float (&acc)[I::kTiles][4]) {
    if constexpr (I::kScaleAccumulators) {
#pragma unroll
      for (int tile = 0; tile < I::kTiles; ++tile) {
        rows.AddScaled(part[tile], acc[tile]);
        if constexpr (I::kSumsLhs) rows.AddZeros(lhs_sums[tile], acc[tile]);
      }
      Clear(part);
    }
  }

  __device__ static void Clear(float (&sums)[I::kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < I::kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[tile][j] = 0;
    }
  }

  // Loads the floats of a slice's super-block. All atoms of a warp are in one super-block.
  template <class R>
  __device__ void LoadSuperFloats(uint32_t stage, int slice, R& rows) const {
    const int super = Opaque(atom_) >> kSuperShift;
    const int row = super * (p_.stage_super_groups + static_cast<int>(kFloatRows)) +
                    p_.stage_super_groups - FirstScaleRow<I>(p_, atom_);
    const uint32_t floats = ScaleAddress(stage, slice, row * kRows);
    rows.LoadScaleFloats(floats);
    if constexpr (I::kZero == ZeroKind::kFloat) rows.LoadZeroFloats(floats + p_.plan.bytes.scales);
  }

  // This lane's offset in a stage's activations for the warp's atom `at`.
  __device__ int PlaceOf(int at) const {
    const int row = (atom_ + at) * I::kTiles * 8 + lhs_;
    const int column = lane_ / 8 % (4 / kUnroll);
    return row * kRowBytes + (column ^ row % 8) * kCopyBytes;
  }

  // `on`: offset from the warp's first group, in rows.
  template <class R>
  __device__ void LoadRows(uint32_t stage, int slice, int on, R& rows) const {
    const uint32_t scales = ScaleAddress(stage, slice, on);
    rows.LoadScales(scales);
    if constexpr (I::kZero == ZeroKind::kInteger) {
      const uint32_t offset = Opaque(scales_[slice]) / sizeof(S);
      rows.LoadIntegerZeros(stage + p_.zeros_at + offset + on);
    }
    if constexpr (I::kZero == ZeroKind::kFloat) rows.LoadFloatZeros(scales + p_.plan.bytes.scales);
  }
  __device__ uint32_t ScaleAddress(uint32_t stage, int slice, int on) const {
    return stage + scales_[slice] + on * static_cast<int>(sizeof(S));
  }

  const Params& p_;
  const int atom_, lane_;  // the first atom of a stage
  // This lane's byte offsets in a stage for the warp's first atom: lhs (or its row), the packed weights of each slice
  // with their step per atom, and the scales of each slice.
  int lhs_;
  int packed_[kSlicesPerWarp], packed_step_[I::kWholeStrips ? 1 : kSlicesPerWarp];
  // Offsets of the other planes' words from the first plane's.
  int others_[kOthers][kPlanes > 1 ? kSlicesPerWarp : 1];
  int scales_[kSlicesPerWarp];
};

}  // namespace jaxlowbit::sm90_stream
