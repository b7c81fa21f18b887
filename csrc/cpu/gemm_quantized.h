// What the GEMMs over quantized rows share: how the work is cut, and how a tile's sums become outputs.
#pragma once

#include "thread_pool.h"
#include "variant.h"
#include "vec_bytes.h"

namespace shardline::SHARDLINE_ISA {

// Scaled sums of a panel's columns plus the bias, rounded once. Scaling and adding are apart, never fused, so that
// every ISA gives the same bits.
inline void finish_row(const QuantizedLinearArgs& args, int64_t row, int64_t first_column, const float* sums) {
  const int64_t columns = min64(kPanelColumns, args.num_columns - first_column);
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = columns - c, column = first_column + c;
    F32 value = load(sums + c);
    if (args.bias != nullptr) {
      value = value + (args.bias_dtype == DType::kFloat32 ? load_n(static_cast<const float*>(args.bias) + column, n)
                                                          : load_n(static_cast<const bf16*>(args.bias) + column, n));
    }
    const int64_t place = row * args.out_stride + column;
    if (args.out_dtype == DType::kFloat32) {
      store_n(static_cast<float*>(args.out) + place, value, n);
    } else {
      store_n(static_cast<bf16*>(args.out) + place, value, n);
    }
  }
}

// Calls tile(panel, first row, number of rows, sums) over all of the output, tiles of at most `tile_rows` rows; the
// tile leaves its scaled sums [rows][64] in `sums`.
template <class Tile>
void for_each_tile(const QuantizedLinearArgs& args, int64_t tile_rows, const Tile& tile) {
  constexpr int64_t kTaskRows = 240;  // at most: their slice of x stays in L2 while a panel passes
  constexpr int64_t kSmallWork = 1 << 16;
  if (args.num_rows == 0 || args.num_columns == 0) return;
  const int64_t num_panels = ceil_div(args.num_columns, kPanelColumns);
  int64_t task_rows = kTaskRows;
  while (task_rows > 30 && num_panels * ceil_div(args.num_rows, task_rows) < 2 * num_threads()) task_rows /= 2;
  const int64_t row_blocks = ceil_div(args.num_rows, task_rows);
  const bool parallel = args.num_rows * args.num_columns * args.depth > kSmallWork;
  parallel_for_if(parallel, row_blocks * num_panels, [&](int64_t task) {
    const int64_t block = task / num_panels;
    const int64_t row_begin = args.num_rows * block / row_blocks;
    const int64_t rows = args.num_rows * (block + 1) / row_blocks - row_begin;
    float* sums = static_cast<float*>(thread_scratch(static_cast<size_t>(tile_rows * kPanelColumns) * sizeof(float)));
    const int64_t num_tiles = ceil_div(rows, tile_rows);
    for (int64_t t = 0; t < num_tiles; ++t) {  // evenly: 8 rows are 4 + 4, not 6 + 2
      const int64_t first = rows * t / num_tiles;
      const int64_t last = rows * (t + 1) / num_tiles;
      tile(task % num_panels, row_begin + first, static_cast<int>(last - first), sums);
      for (int64_t r = first; r < last; ++r) {
        finish_row(args, row_begin + r, task % num_panels * kPanelColumns, sums + (r - first) * kPanelColumns);
      }
    }
  });
}

}  // namespace shardline::SHARDLINE_ISA
