// SPDX-License-Identifier: Apache-2.0
//
// Sizes of the CPU kernel's blocks.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxlowbit {

// Up to kStreamTokens, weights stream through registers, with kStreamSums vectors of sums in the L1 cache.
inline constexpr int64_t kStreamTokens = 16;
inline constexpr int64_t kStreamSums = 512;

// Rows permuted per task; small m is one task.
inline constexpr int64_t kPermutedRows = 16;
static_assert(kPermutedRows >= kStreamTokens);

// 8-bit activations: up to kInt8Rows rows are multiplied one by one, more in tasks of kInt8Tokens by a panel of
// kInt8Atoms. A panel's sums of products are below 2^24, so float32 represents them exactly.
inline constexpr int64_t kInt8Rows = 2;
inline constexpr int64_t kInt8Tokens = 240;
inline constexpr int64_t kInt8Atoms = 4;
inline constexpr int64_t kInt8Words = 20;  // per row and atom: values, and their sums by step
static_assert(kInt8Atoms * kAtom * 255 * 128 < 1 << 24);

// Beyond kStreamTokens: a task's tokens (the reuse of its dequantized weights), its slice of k, and the tokens of one
// register tile.
inline constexpr int64_t kBlockTokens = 240;
inline constexpr int64_t kBlockAtoms = 8;
inline constexpr int64_t kBlockK = kBlockAtoms * kAtom;
inline constexpr int64_t kTileTokens = 6;

// Scratch of one thread: dequantized weights, a tile of lhs, the block's float32 sums.
inline constexpr int64_t kPanelFloats = kAtom * kBlockK;  // 128 KiB: stays in the L2 cache
inline constexpr int64_t kLhsFloats = kTileTokens * kBlockK;
inline constexpr int64_t kSumFloats = kBlockTokens * kAtom;
inline constexpr int64_t kScratchBytes = 4 * (kPanelFloats + kLhsFloats + kSumFloats);

// With AMX a task has kAmxStrips strips if one block of tokens still has kAmxTasks tasks and lhs is larger than
// kAmxLhsBytes, to read lhs less often from beyond the L2 cache. Scratch: the weights of a slice of k, which stay in
// the L1 cache, and the task's sums.
inline constexpr int64_t kAmxBlockTokens = 256;
inline constexpr int64_t kAmxStrips = 4;
inline constexpr int64_t kAmxTasks = 16;
inline constexpr int64_t kAmxLhsBytes = 512 * 1024;
inline constexpr int64_t kAmxTokens = 16;
inline constexpr int64_t kAmxAtoms = 2;
inline constexpr int64_t kTileWeightWords = kAmxAtoms * kAtom * kAtom / 2;

static_assert(kPermutedRows % kAmxTokens == 0);

// Tokens of an AMX tile.
constexpr int64_t TileWidth(int64_t m) { return m < kAmxTokens ? m : kAmxTokens; }

}  // namespace jaxlowbit
