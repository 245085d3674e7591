// SPDX-License-Identifier: Apache-2.0
//
// Global to shared memory: the producer, one thread, which starts one load each of packed weights, activations, scales
// and zeros for a stage. What it takes for a stage must stay below what consumers take, at few rows 500 cycles.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/kernels/sm90/params.cuh"

namespace jaxlowbit::sm90 {

template <class I>
class StageFiller {
 public:
  __device__ StageFiller(const Params& p, int rank, Memory memory)
      : p_(p), memory_(memory), policy_(EvictFirst()), rank_(rank) {}

  // Loads every stage of a task.
  __device__ void Fill(const Task& task, RingCursor& cursor) const {
    const bool gated = p_.epilogue.gated;
    const int first = static_cast<int>(StripOf(p_, task.tile, 0));
    const int up = gated ? static_cast<int>(StripOf(p_, task.tile, 1)) : 0;
    const bool last = task.tile.m0 + I::kM > p_.m;
    const int rows = (last ? p_.last_rows : p_.lhs_rows) << p_.peer_shift;
    const int stage_bytes = p_.plan.bytes.packed + I::kLhsBlocks * rows * kLhsRowBytes;
#pragma unroll 1
    for (int atom = task.atom_begin; atom < task.atom_end; atom += I::kStageAtoms) {
      const Stage stage = {atom, FirstGroup(p_, atom), memory_.stage(p_.plan, cursor.slot),
                           memory_.scales(p_.plan, cursor.slot), memory_.full(cursor.slot)};
      // Scales of a single group that multiply accumulators are read in a task's first stage.
      const bool with_groups = p_.groups > 1 || !I::kScalesChannels || atom == task.atom_begin;
      Wait(memory_.empty(cursor.slot), cursor.parity ^ 1);
      ArriveExpecting(stage.full, stage_bytes + (with_groups ? p_.group_bytes : 0));
      if (gated) {
#pragma unroll
        for (int s = 0; s < I::kCtaStrips; ++s) LoadPacked(stage, s, (s % 2 ? up : first) + s / 2);
      } else {
        LoadPacked(stage, 0, first);
      }
      LoadLhs(stage, task.tile, last);
      if (with_groups && gated) {
#pragma unroll
        for (int s = 0; s < I::kCtaStrips; ++s) LoadGroups(stage, s, (s % 2 ? up : first) + s / 2);
      } else if (with_groups) {
        LoadGroups(stage, 0, first);
      }
      cursor.Advance(p_.plan.num_stages);
    }
  }

 private:
  struct Stage {
    int atom, group;                // the first
    uint32_t memory, scales, full;  // addresses
  };

  static constexpr int kAtomRows = kAtomBytes<I::kBits> / 128;  // of packed weights
  static constexpr int kStripBytes = I::kStageAtoms * kAtomBytes<I::kBits>;

  // Loads a strip, or all strips of a product that is not gated, whose number among those of all weights is `row`.
  __device__ void LoadPacked(const Stage& stage, int strip, int row) const {
    TmaLoad(stage.memory + p_.plan.bytes.lhs + strip * kStripBytes, &p_.packed, 0,
            stage.atom * kAtomRows, row, stage.full, policy_);
  }
  __device__ void LoadGroups(const Stage& stage, int strip, int row) const {
    const StageBytes& bytes = p_.plan.bytes;
    TmaLoad(stage.scales + strip * (bytes.scales / I::kCtaStrips), &p_.scales, 0, stage.group, row,
            stage.full, policy_);
    if constexpr (I::kZero != ZeroKind::kNone) {
      TmaLoad(stage.scales + bytes.scales + strip * (bytes.zeros / I::kCtaStrips), &p_.zeros, 0,
              stage.group, row, stage.full, policy_);
    }
  }

  // `last`: of a tile with fewer rows than others. Columns of the map are 16 bits.
  __device__ void LoadLhs(const Stage& stage, const Tile& tile, bool last) const {
    if (p_.lhs_in_atoms && !last) {
      TmaLoad(stage.memory, &p_.lhs, 0, tile.m0, stage.atom, tile.batch, stage.full);
      return;
    }
#pragma unroll
    for (int i = 0; i < I::kLhsBlocks; ++i) {
      const int atom = stage.atom + i, block = p_.lhs_in_atoms ? atom : 0;
      const int column =
          p_.lhs_in_atoms ? 0 : atom * static_cast<int>(kAtom * sizeof(typename I::T)) / 2;
      const int part = rank_ * (last ? p_.last_rows : p_.lhs_rows);
      const uint32_t target = stage.memory + i * I::kLhsBytes + part * kLhsRowBytes;
      const CUtensorMap* map = last ? &p_.last_lhs : &p_.lhs;
      if (p_.peer_shift == 0) {
        TmaLoad(target, map, column, tile.m0, block, tile.batch, stage.full);
      } else {
        const int peers = (1 << (1 << p_.peer_shift)) - 1;
        TmaLoadMulticast(target, map, column, tile.m0 + part, 0, tile.batch, stage.full, peers);
      }
    }
  }

  const Params& p_;
  const Memory memory_;
  const uint64_t policy_;
  const int rank_;  // among the peers, which load a part of the rows each
};

}  // namespace jaxlowbit::sm90
