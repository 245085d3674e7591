// SPDX-License-Identifier: Apache-2.0
//
// Sizes of the CPU kernel's blocks.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Up to here weights stream through registers, with so many vectors of sums in the L1 cache.
inline constexpr int64_t kStreamTokens = 16;
inline constexpr int64_t kStreamSums = 512;

// Rows that a thread permutes at a time; few rows are one task.
inline constexpr int64_t kPermutedRows = 16;
static_assert(kPermutedRows >= kStreamTokens);

// Activations of 8 bits: at most kInt8Rows are multiplied one by one, more in tasks of kInt8Tokens by a panel of
// kInt8Atoms, whose sums of products are below 2^24: float32 holds them.
inline constexpr int64_t kInt8Rows = 2;
inline constexpr int64_t kInt8Tokens = 240;
inline constexpr int64_t kInt8Atoms = 4;
inline constexpr int64_t kInt8Words = 20;  // of a row in an atom: values, and their sums by step
static_assert(kInt8Atoms * kAtom * 255 * 128 < 1 << 24);

// Beyond: a task's tokens (its dequantized weights are used so often), its slice of k, and the
// tokens of one register tile.
inline constexpr int64_t kBlockTokens = 240;
inline constexpr int64_t kBlockAtoms = 8;
inline constexpr int64_t kBlockK = kBlockAtoms * kAtom;
inline constexpr int64_t kTileTokens = 6;

// Scratch of one thread: dequantized weights, a tile of lhs, the block's float32 sums.
inline constexpr int64_t kPanelFloats = kAtom * kBlockK;  // 128 KiB: stays in the L2 cache
inline constexpr int64_t kLhsFloats = kTileTokens * kBlockK;
inline constexpr int64_t kSumFloats = kBlockTokens * kAtom;
inline constexpr int64_t kScratchBytes = 4 * (kPanelFloats + kLhsFloats + kSumFloats);

// By AMX a task has kAmxStrips where that leaves kAmxTasks of one block of tokens and lhs is larger than kAmxLhsBytes,
// so that it is read from beyond the L2 cache less often. Scratch: the weights of a slice of k, which stay in the L1
// cache, and the task's sums.
inline constexpr int64_t kAmxBlockTokens = 256;
inline constexpr int64_t kAmxStrips = 4;
inline constexpr int64_t kAmxTasks = 16;
inline constexpr int64_t kAmxLhsBytes = 512 * 1024;
inline constexpr int64_t kAmxTokens = 16;
inline constexpr int64_t kAmxAtoms = 2;
inline constexpr int64_t kTileWeightWords = kAmxAtoms * kAtom * kAtom / 2;

static_assert(kPermutedRows % kAmxTokens == 0);

// Tokens of a tile of AMX.
constexpr int64_t TileWidth(int64_t m) { return m < kAmxTokens ? m : kAmxTokens; }

}  // namespace jaxlowbit
