// What the GEMMs share: how the work is cut into tasks, blocks of K and tiles of rows, and what is prefetched
// meanwhile. Nothing here decides in which order the products of an output are added.
#pragma once

#include "dispatch/kernels.h"
#include "dispatch/variant.h"
#include "gemm/gemm_finish.h"
#include "runtime/thread_pool.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kCacheLine = 64;

// The memory of a panel: `num_steps` steps of K (a k, a pair, a quad or a group), one after another. If a step takes
// `unpacked_bytes` for its multiplication, unpack(steps, count, to) unpacks one block of K after another, or with
// `tiles_unpack` the first tile of rows does it. A row of a tile has `row_sums` sums.
struct PanelLayout {
  int64_t num_steps, step_bytes, unpacked_bytes = 0, row_sums = kPanelColumns;
  bool tiles_unpack = false;
};

// Rows [row, row + rows) of x times the steps [begin, end) of a panel; `steps` points to step `begin`. The sums
// [rows][row_sums], fp32 or int32, begin at step 0 and wait in `sums` between blocks of K. `ahead` is memory that a later
// tile reads, and that this tile prefetches step by step. A tile with `unpacked` reads packed steps, and also unpacks
// them to there.
struct Tile {
  int64_t row;
  int rows;
  bool wide;
  const char* steps;
  int64_t begin, end;
  void* sums;
  const char* ahead;
  int64_t ahead_stride;
  int64_t panel;
  char* unpacked;
};

// A wide tile reads half of a panel's columns at a time, and meanwhile prefetches all of the next panel. When weights
// come from memory, that is up to twice as fast as two tiles, of which only the first would read memory.
constexpr int kWideVectors = 2;

constexpr bool asks_ahead(int rows, bool wide) { return kLanes == 16 && (wide || rows >= 3); }

// Fetches a tile's `ahead` into L2, two cache lines at a time. Blocks of K are larger than L1.
class Ahead {
 public:
  Ahead(const Tile& tile, int64_t requests_per_step)
      : next_(tile.ahead), stride_(ceil_div(tile.ahead_stride, requests_per_step)) {}

  inline void request() {
    __builtin_prefetch(next_, 0, kToL2);
    __builtin_prefetch(next_ + kCacheLine, 0, kToL2);
    next_ += stride_;
  }

 private:
  const char* next_;
  int64_t stride_;
};

// Calls body(tile, Constant<rows>, Constant<wide>) for a tile of at most kMost rows, or a wide one.
template <int kMost, class Body>
void with_rows(const Tile& tile, const Body& body) {
  if constexpr (kMost > 1) {
    if (tile.rows < kMost) return with_rows<kMost - 1>(tile, body);
  }
  body(tile, Constant<kMost>(), Constant<false>());
}
template <int kWideMin, int kRows, class Body>
void with_wide_rows(const Tile& tile, const Body& body) {
  if constexpr (kRows >= kWideMin) {
    if (tile.rows < kRows) return with_wide_rows<kWideMin, kRows - 1>(tile, body);
    body(tile, Constant<kRows>(), Constant<true>());
  }
}

// Multiplies some rows by one panel. The memory that is prefetched follows: the next block of K, or the panel of the
// thread's next task. A block leaves room for it in L2.
template <int kTileRows, int kWideMin, int kWideMax, class Args, class Add, class Unpack>
void panel_task(const Args& args, const PanelLayout& layout, int64_t panel_index, int64_t row_begin, int64_t rows,
                const Add& add, Finish<Args> finish, const Unpack& unpack) {
  constexpr int64_t kBlockBytes = 128 << 10;
  if (write_excluded_panel(args, row_begin, rows, panel_index)) return;
  const bool wide = rows >= kWideMin && rows <= kWideMax;
  const int64_t num_tiles = wide ? 1 : ceil_div(rows, kTileRows);
  const int64_t least_rows = rows / num_tiles;  // evenly: 9 rows are 5 + 4, not 6 + 3
  const bool ask = wide || num_tiles > 1;
  const int64_t panel_bytes = layout.num_steps * layout.step_bytes, num_sums = rows * layout.row_sums;
  const int64_t block_step_bytes = max64(layout.step_bytes, layout.unpacked_bytes);
  const bool cut = ask || layout.unpacked_bytes > 0;
  const int64_t num_blocks = cut ? ceil_div(layout.num_steps * block_step_bytes, kBlockBytes) : 1;
  const int64_t unpacked_bytes = ceil_div(layout.num_steps, num_blocks) * layout.unpacked_bytes;
  const char* panel = static_cast<const char*>(static_cast<const void*>(args.panels)) + panel_index * panel_bytes;
  float* sums = static_cast<float*>(thread_scratch(static_cast<size_t>(num_sums) * sizeof(float) +
                                                   static_cast<size_t>(unpacked_bytes)));
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t begin = layout.num_steps * b / num_blocks, end = layout.num_steps * (b + 1) / num_blocks;
    const char* packed = panel + begin * layout.step_bytes;
    char* unpacked = layout.unpacked_bytes > 0 ? static_cast<char*>(static_cast<void*>(sums + num_sums)) : nullptr;
    if (unpacked != nullptr && !layout.tiles_unpack) unpack(packed, end - begin, unpacked);
    const int64_t share = ask ? ceil_div((end - begin) * layout.step_bytes, num_tiles) : 0;
    const int64_t stride = ceil_div(share, end - begin);
    for (int64_t t = 0, first = 0, last; t < num_tiles; ++t, first = last) {
      last = first + least_rows + (t < rows % num_tiles ? 1 : 0);
      const bool unpacks = layout.tiles_unpack && t == 0;
      const char* steps = unpacked == nullptr || unpacks ? packed : unpacked;
      const Tile tile = {row_begin + first, static_cast<int>(last - first), wide, steps, begin, end,
                         sums + first * layout.row_sums, panel + end * layout.step_bytes + t * share, stride,
                         panel_index, unpacks ? unpacked : nullptr};
      wide ? with_wide_rows<kWideMin, kWideMax>(tile, add) : with_rows<kTileRows>(tile, add);
      if (b + 1 == num_blocks) finish(args, {tile.row, last - first, panel_index, tile.sums});
    }
  }
}

inline void keep_packed(const char*, int64_t, void*) {}

// Calls add(tile, Constant<rows>, Constant<wide>) over all of the output and its K, and finish(args, FinishedTile) for
// each tile when its sums are complete.
template <int kTileRows, int kWideMin, int kWideMax, class Args, class Add,
          class Unpack = decltype(keep_packed)>
void for_each_tile(const Args& args, const PanelLayout& layout, const Add& add, Finish<Args> finish,
                   const Unpack& unpack = keep_packed) {
  constexpr int64_t kTaskRows = 240;  // at most, so that their slice of x stays in L2 while a panel passes
  constexpr int64_t kSmallWork = 1 << 16;
  if (args.num_rows == 0 || args.num_columns == 0) return;
  const int64_t num_panels = ceil_div(args.num_columns, args.gated ? kGatedColumns : kPanelColumns);
  int64_t task_rows = kTaskRows;
  while (task_rows > 30 && num_panels * ceil_div(args.num_rows, task_rows) < 2 * num_threads()) task_rows /= 2;
  const int64_t row_blocks = ceil_div(args.num_rows, task_rows);
  const bool parallel = args.num_rows * num_panels * kPanelColumns * args.depth > kSmallWork;
  parallel_for_if(parallel, row_blocks * num_panels, [&](int64_t task) {
    const int64_t block = task / num_panels;
    const int64_t row_begin = args.num_rows * block / row_blocks;
    const int64_t row_end = args.num_rows * (block + 1) / row_blocks;
    panel_task<kTileRows, kWideMin, kWideMax>(args, layout, task % num_panels, row_begin, row_end - row_begin, add,
                                              finish, unpack);
  });
}

}  // namespace shardline::SHARDLINE_ISA
