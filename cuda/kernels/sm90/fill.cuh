// SPDX-License-Identifier: Apache-2.0
//
// The producer, one thread: per stage, one TMA load each of packed weights, activations, scales and zeros. It must be
// faster than the consumers, which take 500 cycles per stage at small m.
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

  // Starts loading weights, which no kernel of the call writes, into the first stages of the first task, and returns
  // the number of these stages. Loads arrive in order, so this costs time if there is no previous kernel to wait for.
  __device__ int LoadAhead(const Task& task) const {
    const Strips strips = StripsOf(task.tile);
    RingCursor cursor = {0, 0};
    int ahead = 0;
#pragma unroll 1
    for (int atom = task.atom_begin; atom < task.atom_end && ahead < p_.ahead_stages;
         atom += I::kStageAtoms, ++ahead) {
      LoadWeights(task, strips, StageOf(atom, cursor));
      cursor.Advance(p_.plan.num_stages);
    }
    return ahead;
  }

  // Loads every stage of a task; `ahead`: the number of stages with weights already loading.
  __device__ void Fill(const Task& task, int ahead, RingCursor& cursor) const {
    const Strips strips = StripsOf(task.tile);
    const bool last = IsLast(task.tile);
#pragma unroll 1
    for (int atom = task.atom_begin; atom < task.atom_end; atom += I::kStageAtoms, --ahead) {
      const Stage stage = StageOf(atom, cursor);
      if (ahead <= 0) {
        Wait(memory_.empty(cursor.slot), cursor.parity ^ 1);
        LoadWeights(task, strips, stage);
      }
      LoadLhs(stage, task.tile, last);
      cursor.Advance(p_.plan.num_stages);
    }
  }

  // Starts loading all scales of a tile to L2: the consumers check them before they multiply (TileMultiplier).
  __device__ void PrefetchScales(const Tile& tile) const {
    const int bytes = p_.groups * static_cast<int>(kAtom * sizeof(typename I::S));
    const int strips = min(I::kCtaStrips, p_.strips - tile.strip);
    for (int s = 0; s < strips; ++s) {
      PrefetchToL2(static_cast<const char*>(p_.scale) + StripOf<I>(p_, tile, s) * bytes, bytes);
    }
  }

 private:
  struct Stage {
    int atom, group;                // the first
    uint32_t memory, scales, full;  // addresses
  };

  // The first strip of a tile, counted over all weights; in a gated product, the first of the gate and of up.
  struct Strips {
    int first, up;
    // Strip s of the CTA, in a gated product.
    __device__ int Of(int s) const { return (s % 2 ? up : first) + s / 2; }
  };

  static constexpr int kAtomRows = kAtomBytes<I::kBits> / 128;  // of packed weights
  static constexpr int kStripBytes = I::kStageAtoms * kAtomBytes<I::kBits>;

  __device__ Strips StripsOf(const Tile& tile) const {
    return {static_cast<int>(StripOf<I>(p_, tile, 0)),
            p_.epilogue.gated ? static_cast<int>(StripOf<I>(p_, tile, 1)) : 0};
  }

  __device__ Stage StageOf(int atom, const RingCursor& cursor) const {
    return {atom, FirstGroup(p_, atom), memory_.stage(p_.plan, cursor.slot),
            memory_.scales(p_.plan, cursor.slot), memory_.full(cursor.slot)};
  }

  // Whether a tile has fewer rows than others.
  __device__ bool IsLast(const Tile& tile) const {
    if constexpr (I::kRagged) return false;  // the rows of the next group follow
    return tile.m0 + I::kM > ScheduleOf(p_).Rows(tile.batch);
  }

  // Loads packed weights, scales and zeros of a free stage. Its barrier expects these bytes and the bytes of lhs.
  __device__ void LoadWeights(const Task& task, const Strips& strips, const Stage& stage) const {
    const bool gated = p_.epilogue.gated;
    const int rows = (IsLast(task.tile) ? p_.last_rows : p_.lhs_rows) << p_.peer_shift;
    // Scales of a single group that multiply accumulators are read in a task's first stage.
    const bool with_groups = p_.groups > 1 || !I::kScalesChannels || stage.atom == task.atom_begin;
    ArriveExpecting(stage.full, p_.plan.bytes.packed + I::kLhsBlocks * rows * kLhsRowBytes +
                                    (with_groups ? p_.group_bytes : 0));
    if (gated) {
#pragma unroll
      for (int s = 0; s < I::kCtaStrips; ++s) LoadPacked(stage, s, strips.Of(s));
    } else {
      LoadPacked(stage, 0, strips.first);
    }
    if (with_groups && gated) {
#pragma unroll
      for (int s = 0; s < I::kCtaStrips; ++s) LoadGroups(stage, s, strips.Of(s));
    } else if (with_groups) {
      LoadGroups(stage, 0, strips.first);
    }
  }

  // Loads the packed weights of strip `row`, counted over all weights; in an ungated product, of all strips of the
  // tile.
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

  // `last`: IsLast(tile). The map's columns are 16-bit elements.
  __device__ void LoadLhs(const Stage& stage, const Tile& tile, bool last) const {
    const int batch = I::kRagged ? 0 : tile.batch;
    if (p_.lhs_in_atoms && !last) {
      TmaLoad(stage.memory, &p_.lhs, 0, tile.m0, stage.atom, batch, stage.full);
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
        TmaLoad(target, map, column, tile.m0, block, batch, stage.full);
      } else {
        const int peers = (1 << (1 << p_.peer_shift)) - 1;
        TmaLoadMulticast(target, map, column, tile.m0 + part, 0, batch, stage.full, peers);
      }
    }
  }

  const Params& p_;
  const Memory memory_;
  const uint64_t policy_;
  const int rank_;  // among the peers; each loads a part of the rows
};

}  // namespace jaxlowbit::sm90
