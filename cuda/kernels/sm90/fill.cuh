// SPDX-License-Identifier: Apache-2.0
//
// Global to shared memory: the producer warp. Each of its lanes loads the same thing of every stage.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm90/params.cuh"

namespace jaxlowbit::sm90 {

template <class I>
class StageFiller {
 public:
  __device__ StageFiller(const Params& p, int rank, Memory memory)
      : p_(p), rank_(rank), memory_(memory), policy_(EvictFirst()), lane_(threadIdx.x % 32) {}

  // Loads every stage of a task.
  __device__ void Fill(const Task& task, RingCursor& cursor) {
    StartTile(task.tile);
    for (int atom = task.atom_begin; atom < task.atom_end; atom += I::kStageAtoms) {
      Wait(memory_.empty(cursor.slot), cursor.parity ^ 1);
      FillStage(task.tile, atom, cursor.slot);
      cursor.Advance(p_.plan.num_stages);
    }
  }

 private:
  static constexpr int kCtaStrips = I::kCtaStrips;
  static constexpr int kRowBytes = static_cast<int>(kAtom) * 2;  // of lhs and an atom
  static constexpr int kLhsBytes = I::kM * kRowBytes;
  static constexpr int kAtomRows = kAtomBytes<I::kBits> / 128;  // of packed weights
  static constexpr int kStripBytes = I::kStageAtoms * kAtomBytes<I::kBits>;
  static_assert(3 * kCtaStrips <= 32);

  // Finds what this lane loads: packed weights, scales or zeros of a strip.
  __device__ void StartTile(const Tile& tile) {
    const Plan& plan = p_.plan;
    const int kind = lane_ / kCtaStrips, strip = lane_ % kCtaStrips;
    strips_ = max(0, min(kCtaStrips, p_.strips - tile.strip));
    bytes_ = 0;  // of a group
    loads_packed_ = kind == 0 && strip < strips_;
    if (strip >= strips_) return;
    const int64_t row = StripOf(p_, tile, strip);
    if (loads_packed_) {
      row_ = static_cast<int>(row);
      target_ = plan.bytes.lhs + strip * kStripBytes;
    } else if (kind <= 2) {
      const bool zero = kind == 2;
      bytes_ = static_cast<int>(kAtom) *
               (zero ? p_.zero_bytes : static_cast<int>(sizeof(typename I::S)));
      source_ = static_cast<const uint8_t*>(zero ? p_.zero : p_.scale) + row * p_.groups * bytes_;
      target_ = (zero ? plan.bytes.scales : 0) + strip * plan.stage_groups * bytes_;
    }
  }

  __device__ void FillStage(const Tile& tile, int atom, int slot) const {
    const int atoms = min(I::kStageAtoms, p_.k_blocks - atom);
    const int group = FirstGroup(p_, atom);
    const int groups = FirstGroup(p_, atom + atoms - 1) + p_.groups_per_atom - group;
    const uint32_t barrier = memory_.full(slot), stage = memory_.stage(p_.plan, slot);
    if (lane_ == 0) {
      const int group_bytes =
          static_cast<int>(kAtom) * (static_cast<int>(sizeof(typename I::S)) + p_.zero_bytes);
      const int lhs_bytes = (p_.lhs_rows << p_.peer_shift) * kRowBytes;
      ArriveExpecting(barrier, atoms * lhs_bytes + strips_ * (kStripBytes + groups * group_bytes));
    }
    __syncwarp();
    if (loads_packed_) {
      TmaLoad(stage + target_, &p_.packed, 0, atom * kAtomRows, row_, barrier, policy_);
    } else if (bytes_ > 0) {
      BulkLoad(memory_.scales(p_.plan, slot) + target_, source_ + int64_t{group} * bytes_,
               bytes_ * groups, barrier, policy_);
    }
    if (lane_ >= 32 - I::kStageAtoms) {
      const int own = lane_ - (32 - I::kStageAtoms);
      const int k = (atom + own) * static_cast<int>(kAtom), m0 = rank_ * p_.lhs_rows;
      const uint32_t target = stage + own * kLhsBytes + m0 * kRowBytes;
      if (own < atoms && p_.peer_shift == 0) {
        TmaLoad(target, &p_.lhs, k, tile.m0, tile.batch, barrier);
      } else if (own < atoms) {
        const int peers = (1 << (1 << p_.peer_shift)) - 1;
        TmaLoadMulticast(target, &p_.lhs, k, tile.m0 + m0, tile.batch, barrier, peers);
      }
    }
  }

  const Params& p_;
  const int rank_;
  const Memory memory_;
  const uint64_t policy_;
  const int lane_;
  int strips_;  // strips of the tile that exist
  bool loads_packed_;
  int row_;  // among the strips of all weights
  const uint8_t* source_;
  int target_, bytes_;
};

}  // namespace jaxlowbit::sm90
