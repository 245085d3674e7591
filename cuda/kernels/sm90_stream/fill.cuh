// SPDX-License-Identifier: Apache-2.0
//
// A producer warp: global to shared memory. Each lane loads the same piece of every stage, so it computes addresses
// once per tile. A piece is the packed weights of a strip, the packed weights of part of a strip in one atom, or the
// scales or zeros of a strip.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm90_stream/params.cuh"

namespace jaxlowbit::sm90_stream {

template <class I>
class StageFiller {
 public:
  using S = typename I::S;

  __device__ StageFiller(const Params& p, const Share& share, Memory memory)
      : p_(p),
        share_(share),
        product_(p.products[OwnProduct(p)]),
        memory_(memory),
        policy_(EvictFirst()),
        lane_(threadIdx.x % 32) {
    const bool gated = p_.epilogue.gated;
    const auto schedule = ScheduleOf<I>(p_, share_);
    first_strip_ = FirstStrip(schedule.Position(share_.batch));
    if (gated) up_strip_ = FirstStrip(schedule.UpPosition(share_.batch));
    StartTile(share_.slice_begin);
  }

  // Loads every stage of every tile, in order, and lets the next kernel start. Weights and their indices do not depend on
  // the previous kernel, so weights of the first stages are loaded before it ends.
  __device__ void FillAll() {
    const int filled = min(share_.stages, p_.plan.num_stages);
    const int early = min(filled, p_.prologue_stages);
    until_next_ = p_.loads_until_next;
    if (I::kStartsNextLate && until_next_ == 0) LaunchDependents();
#pragma unroll 1
    for (int stage = 0; stage < early; ++stage) FillWeights(stage, stage);
    // Addresses of activations: after the wait, each instruction delays the first mma.
    uint32_t slot = Opaque(memory_.stage(p_.plan, 0)), barrier = Opaque(memory_.full(0));
    int row = Opaque(LhsRow<I>(p_, share_)), atom = Opaque(share_.atom_begin);
    const int slot_bytes = Opaque(p_.plan.slot_bytes), atoms = Opaque(p_.plan.stage_atoms);
    WaitForPreviousKernels(slot ^ barrier ^ row ^ atom ^ slot_bytes ^ atoms);
    if (I::kDivided && p_.holds_next) LaunchDependents();
    if (I::kLhsPath == LhsPath::kStages && lane_ == 0) {
#pragma unroll 1
      for (int stage = 0; stage < early; ++stage) {
        TmaLoad(slot, &p_.lhs, 0, row, atom, barrier);
        slot += slot_bytes, barrier += kBarrierBytes, atom += atoms;
      }
    }
    for (int stage = early; stage < filled; ++stage) {
      FillWeights(stage, stage);
      FillLhs(stage, stage);
    }
    const bool all_used = filled == p_.plan.num_stages;
    RingCursor cursor = {all_used ? 0 : filled, all_used ? 0 : 1};
    Fill(filled, cursor);
  }

  // Loads every stage, from `filled` of the first tile on.
  __device__ void Fill(int filled, RingCursor& cursor) {
    for (int slice = share_.slice_begin; slice < share_.slice_end; slice += p_.plan.tile_slices) {
      const bool first = slice == share_.slice_begin;
      if (!first) StartTile(slice);
      for (int stage = first ? filled : 0; stage < share_.stages; ++stage) {
        FillStage(stage, cursor);
        if (I::kStartsNextLate && --until_next_ == 0) LaunchDependents();
      }
    }
  }

  // Loads a stage when its slot is free.
  __device__ void FillStage(int stage, RingCursor& cursor) const {
    Wait(memory_.empty(cursor.slot), cursor.parity);  // returns at once in the first phase
    FillWeights(stage, cursor.slot);
    FillLhs(stage, cursor.slot);
    cursor.Advance(p_.plan.num_stages);
  }

 private:
  // The first strip of the weight at a position.
  __device__ int64_t FirstStrip(int position) const {
    return WeightAt(product_.index, product_.num_weights, position) * product_.n_blocks;
  }

  // Index of a strip of this CTA's batch element among the strips of all weights.
  __device__ int64_t StripAt(int strip) const {
    if (!p_.epilogue.gated) return first_strip_ + strip;
    return (strip % 2 == 0 ? first_strip_ : up_strip_) + strip / 2;
  }

  // Assigns this lane its piece of the stages of the tile that begins with `slice`.
  __device__ void StartTile(int slice) {
    const Plan& plan = p_.plan;
    const int slices = min(plan.tile_slices, share_.slice_end - slice);
    const int strip = slice / kSlicesPerStrip;
    const int strips = (slice + slices - 1) / kSlicesPerStrip - strip + 1;
    packed_bytes_ = slices * I::kSliceBytes;
    group_bytes_ = strips * static_cast<int>(kAtom) * (sizeof(S) + p_.zero_bytes);
    bytes_ = 0;  // this lane loads nothing
    kind_ = Kind::kStrip;

    const int packed = strips << plan.stage_shift;
    if (lane_ < packed) {
      const int own = strip + (lane_ >> plan.stage_shift);
      const int begin = max(slice, own * kSlicesPerStrip);  // the part in the tile
      const int end = min(slice + slices, (own + 1) * kSlicesPerStrip);
      const bool whole = end - begin == kSlicesPerStrip;
      kind_ = whole ? Kind::kStrip : Kind::kAtom;
      atom_ = lane_ & (plan.stage_atoms - 1);
      if (whole && atom_ > 0) return;
      bytes_ = (end - begin) * I::kSliceBytes;
      source_ = reinterpret_cast<const uint8_t*>(product_.packed) +
                (StripAt(own) * p_.k_blocks + share_.atom_begin + atom_) * kAtomBytes<I::kBits> +
                begin % kSlicesPerStrip * I::kSliceBytes;
      target_ =
          plan.bytes.lhs + (begin - slice) * (I::kSliceBytes << plan.stage_shift) + atom_ * bytes_;
      return;
    }
    const int own = (lane_ - packed) >> 1;
    const bool zero = (lane_ - packed) % 2 != 0;
    if (own >= strips || (zero && p_.zero_bytes == 0)) return;
    kind_ = Kind::kGroups;
    bytes_ = static_cast<int>(kAtom) * (zero ? p_.zero_bytes : static_cast<int>(sizeof(S)));
    source_ = static_cast<const uint8_t*>(zero ? product_.zero : product_.scale) +
              StripAt(strip + own) * p_.groups * bytes_;
    target_ = plan.bytes.lhs + plan.bytes.packed + (zero ? plan.bytes.scales : 0) +
              own * plan.stage_groups * bytes_;
  }

  __device__ void FillWeights(int stage, int slot) const {
    const int first = share_.atom_begin + (stage << p_.plan.stage_shift);
    const int atoms = min(p_.plan.stage_atoms, share_.atom_end - first);
    const int group = FirstScaleRow<I>(p_, first);
    const int groups = min(p_.plan.stage_groups, p_.groups - group);
    const uint32_t barrier = memory_.full(slot);
    if (lane_ == 0) {
      ArriveExpecting(barrier, atoms * packed_bytes_ + p_.plan.bytes.lhs + groups * group_bytes_);
    }
    __syncwarp();
    if constexpr (I::kSuperBlocks) {
      if (kind_ == Kind::kGroups && p_.plan.stage_atoms < kSuperAtoms) {
        FillPartOfSuperBlock(first, slot);
        return;
      }
    }
    const int bytes = kind_ == Kind::kGroups  ? bytes_ * groups
                      : kind_ == Kind::kStrip ? bytes_ * atoms
                      : atom_ < atoms         ? bytes_
                                              : 0;
    if (bytes > 0) {
      const int64_t offset = kind_ == Kind::kGroups
                                 ? int64_t{group} * bytes_
                                 : (int64_t{stage} << p_.plan.stage_shift) * kAtomBytes<I::kBits>;
      BulkLoad(memory_.stage(p_.plan, slot) + target_, source_ + offset, bytes, barrier, policy_);
    }
  }

  // For a stage inside a super-block: loads the integers of the stage's groups, and the floats, which follow the
  // integers of all groups.
  __device__ void FillPartOfSuperBlock(int first, int slot) const {
    if (bytes_ == 0) return;
    const uint32_t barrier = memory_.full(slot), target = memory_.stage(p_.plan, slot) + target_;
    const int integers = p_.stage_super_groups * bytes_;
    const int super = first >> kSuperShift;
    const int floats = super * (p_.super_groups + static_cast<int>(kFloatRows)) + p_.super_groups;
    BulkLoad(target, source_ + int64_t{FirstScaleRow<I>(p_, first)} * bytes_, integers, barrier,
             policy_);
    BulkLoad(target + integers, source_ + int64_t{floats} * bytes_,
             static_cast<int>(kFloatRows) * bytes_, barrier, policy_);
  }

  // Activations of a whole stage are one load: columns beyond k are zeros.
  __device__ void FillLhs(int stage, int slot) const {
    if (I::kLhsPath == LhsPath::kStages && lane_ == 0) {
      TmaLoad(memory_.stage(p_.plan, slot), &p_.lhs, 0, LhsRow<I>(p_, share_),
              share_.atom_begin + (stage << p_.plan.stage_shift), memory_.full(slot));
    }
  }

  const Params& p_;
  const Share& share_;
  const Product& product_;
  const Memory memory_;
  const uint64_t policy_;
  const int lane_;
  int until_next_ = 0;
  int64_t first_strip_, up_strip_;  // of the weight, or of the gate; of up
  // Bytes of this tile per stage: packed weights per atom, scales and zeros per group.
  int packed_bytes_, group_bytes_;
  // The piece that this lane loads; source_ is its address in the tile's first stage or in the first group.
  enum class Kind {
    kAtom,   // a part of a strip's packed weights, of one atom: bytes_
    kStrip,  // all packed weights of a strip: bytes_ for each atom
    kGroups  // a strip's scales or zeros: bytes_ for each group
  } kind_;
  int atom_;  // of the stage
  const uint8_t* source_;
  int target_, bytes_;
};

}  // namespace jaxlowbit::sm90_stream
