// SPDX-License-Identifier: Apache-2.0
//
// Global to shared memory, by bulk copies that one warp issues. Of every stage, each of its lanes
// copies the same one thing: the codes, the scales or the zeros of a strip. So addresses are worked out once
// for a tile.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/dependency.cuh"
#include "cuda/qmm_sm90_stream/params.cuh"

namespace jaxlowbit::qmm_sm90_stream {

template <class I>
class StageFiller {
 public:
  using S = typename I::S;

  __device__ StageFiller(const Params& p, const Share& share, Memory memory)
      : p_(p),
        share_(share),
        part_(p.parts[OwnPart(p)]),
        memory_(memory),
        policy_(EvictFirst()),
        lane_(threadIdx.x % 32) {
    const bool gated = p_.epilogue.gated;
    first_strip_ = FirstStrip(gated ? 2 * share_.batch : share_.batch);
    if (gated) up_strip_ = FirstStrip(2 * share_.batch + 1);
    StartTile(share_.slice_begin);
  }

  // Copies every stage of every tile, in their order. Weights, and which of them, do not depend on the
  // kernel before this one, so those of the first stages are on their way before its end.
  __device__ void FillAll() {
    const int filled = min(share_.stages, p_.plan.num_stages);
    const int early = min(filled, p_.early_stages);
#pragma unroll 1
    for (int stage = 0; stage < early; ++stage) FillWeights(stage, stage);
    WaitForPreviousKernels();
    for (int stage = 0; stage < filled; ++stage) {
      if (stage >= early) FillWeights(stage, stage);
      FillLhs(stage, stage);
    }
    const bool all_used = filled == p_.plan.num_stages;
    RingCursor cursor = {all_used ? 0 : filled, all_used ? 0 : 1};
    for (int slice = share_.slice_begin; slice < share_.slice_end; slice += p_.plan.tile_slices) {
      const bool first = slice == share_.slice_begin;
      if (!first) StartTile(slice);
      for (int stage = first ? filled : 0; stage < share_.stages; ++stage) {
        Wait(memory_.empty(cursor.slot), cursor.parity);  // of the phase before the first: no wait
        FillWeights(stage, cursor.slot);
        FillLhs(stage, cursor.slot);
        cursor.Advance(p_.plan.num_stages);
      }
    }
  }

 private:
  // Of number `position` of the weights that the batch is multiplied by.
  __device__ int64_t FirstStrip(int position) const {
    const int64_t weight = part_.index == nullptr ? position : part_.index[position];
    return min(max(weight, int64_t{0}), part_.num_weights - 1) * part_.n_blocks;
  }

  // Where a strip of this CTA's element of the batch is among those of all weights.
  __device__ int64_t StripAt(int strip) const {
    if (!p_.epilogue.gated) return first_strip_ + strip;
    return (strip % 2 == 0 ? first_strip_ : up_strip_) + strip / 2;
  }

  // What this lane copies of the stages of the tile that begins with `slice`.
  __device__ void StartTile(int slice) {
    const Plan& plan = p_.plan;
    const int strip = slice / kSlicesPerStrip;
    const int strips = min(plan.tile_slices, share_.slice_end - slice) / kSlicesPerStrip;
    code_bytes_ = strips * kAtomBytes<I::kBits>;
    group_bytes_ = strips * static_cast<int>(kAtom) * (sizeof(S) + p_.zero_bytes);
    bytes_ = 0;  // until this lane has something to copy
    const int kind = lane_ / strips, own = lane_ % strips;
    codes_ = kind == 0;
    if (codes_) {
      bytes_ = kAtomBytes<I::kBits>;
      source_ = reinterpret_cast<const uint8_t*>(part_.packed) +
                (StripAt(strip + own) * p_.k_blocks + share_.atom_begin) * bytes_;
      target_ = plan.bytes.lhs + own * (bytes_ << plan.stage_shift);
    } else if (kind == 1 || (kind == 2 && p_.zero_bytes > 0)) {
      const bool zero = kind == 2;
      bytes_ = static_cast<int>(kAtom) * (zero ? p_.zero_bytes : static_cast<int>(sizeof(S)));
      source_ = static_cast<const uint8_t*>(zero ? part_.zero : part_.scale) +
                StripAt(strip + own) * p_.groups * bytes_;
      target_ = plan.bytes.lhs + plan.bytes.codes + (zero ? plan.bytes.scales : 0) +
                own * plan.stage_groups * bytes_;
    }
  }

  __device__ void FillWeights(int stage, int slot) const {
    const int first = share_.atom_begin + (stage << p_.plan.stage_shift);
    const int atoms = min(p_.plan.stage_atoms, share_.atom_end - first);
    const int group = FirstGroup(p_, first);
    const int groups = min(p_.plan.stage_groups, p_.groups - group);
    const uint32_t barrier = memory_.full(slot);
    if (lane_ == 0) {
      ArriveExpecting(
          barrier, atoms * code_bytes_ + kLhsBytes * p_.plan.stage_atoms + groups * group_bytes_);
    }
    __syncwarp();
    if (bytes_ > 0) {
      const int64_t begin = codes_ ? int64_t{stage} << p_.plan.stage_shift : group;
      CopyBulk(memory_.stage(p_.plan, slot) + target_, source_ + begin * bytes_,
               bytes_ * (codes_ ? atoms : groups), barrier, policy_);
    }
  }

  // Activations of a whole stage are one copy: what is beyond k comes as zeros.
  __device__ void FillLhs(int stage, int slot) const {
    if (!I::kGathers && lane_ == 0) {
      CopyBox(memory_.stage(p_.plan, slot), &p_.lhs, 0, share_.batch * p_.m,
              share_.atom_begin + (stage << p_.plan.stage_shift), memory_.full(slot));
    }
  }

  static constexpr int kLhsBytes = I::kGathers ? 0 : I::kTiles * 8 * kRowBytes;  // of an atom

  const Params& p_;
  const Share& share_;
  const Part& part_;
  const Memory memory_;
  const uint64_t policy_;
  const int lane_;
  int64_t first_strip_, up_strip_;  // of the weight, or of the gate; of up
  // Of a stage of this tile: bytes of codes for one atom, of scales and zeros for one group.
  int code_bytes_, group_bytes_;
  // What this lane copies, from source_ in the tile's first stage, or in the first group: codes of a strip,
  // bytes_ for each atom; or its scales or zeros, bytes_ for each group.
  bool codes_;
  const uint8_t* source_;
  int target_, bytes_;
};

}  // namespace jaxlowbit::qmm_sm90_stream
