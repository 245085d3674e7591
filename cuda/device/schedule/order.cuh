// SPDX-License-Identifier: Apache-2.0
//
// Orders of tiles: map the number of a tile to its batch element, rows and columns.
#pragma once

#include <cstdint>

#include "cuda/device/divide.cuh"

namespace jaxlowbit {

// Position of a tile: batch element, split of k, first column, first row, in the units of block_n and block_m.
template <typename Int>
struct TilePlace {
  Int batch;
  int split, column;
  Int row;
};

// Rows vary fastest, then columns, then splits of k, so CTAs that share weights run together and find them in L2.
struct RowsFirst {
  const int64_t &m_tiles, &n_tiles;
  const int& splits;

  __device__ TilePlace<int64_t> Find(int64_t number, int block_n, int block_m) const {
    TilePlace<int64_t> place;
    place.row = number % m_tiles * block_m;
    number /= m_tiles;
    place.column = static_cast<int>(number % n_tiles) * block_n;
    number /= n_tiles;
    place.split = static_cast<int>(number % splits);
    place.batch = number / splits;
    return place;
  }
};

// Bands of kBand tiles along the columns; rows vary slowest within a band. Tiles that run at the same time share
// weights and rows.
inline constexpr int kBand = 16;

struct Bands {
  const int& tiles_n;
  const WideDivider &batch_tiles, &band_tiles;  // tiles per batch element, and per band
  const WideDivider& last_width;                // of the last band

  __device__ TilePlace<int> Find(int number, int block_n, int block_m) const {
    const int batch = batch_tiles.Divide(number);
    const int in_batch = number - batch * batch_tiles.divisor;
    const int band = band_tiles.Divide(in_batch);
    const int in_band = in_batch - band * band_tiles.divisor;
    const bool whole = (band + 1) * kBand <= tiles_n;
    const int along_m = whole ? in_band / kBand : last_width.Divide(in_band);
    const int along_n = in_band - along_m * (whole ? kBand : last_width.divisor);
    return {batch, 0, (band * kBand + along_n) * block_n, along_m * block_m};
  }
};

}  // namespace jaxlowbit
