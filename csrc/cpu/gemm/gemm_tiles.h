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
// [rows][row_sums], fp32 or int32, begin at step 0 and wait in `sums` between blocks of K. `ahead` is memory that a
// later tile reads, and that this tile prefetches step by step. A tile with `unpacked` reads packed steps, and also
// unpacks them to there.
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

// How the rows of a task are cut into tiles, for tiles whose number of rows is a constant of their code: at most
// kTileRows, or one wide tile of kWideMin to kWideMax rows.
template <int kTileRows, int kWideMin, int kWideMax>
struct ConstantTiles {
  static constexpr int64_t kTaskElements = int64_t{1} << 62;  // of x: any number
  static constexpr int64_t kTaskRows = 240, kRowsTogether = 1, kStepsTogether = 1;

  explicit ConstantTiles(int64_t rows)
      : wide(rows >= kWideMin && rows <= kWideMax), num_tiles(wide ? 1 : ceil_div(rows, kTileRows)), num_rows(rows) {}

  // Evenly: 9 rows are 5 + 4, not 6 + 3.
  int64_t begin(int64_t t) const { return num_rows / num_tiles * t + min64(t, num_rows % num_tiles); }
  bool asks() const { return wide || num_tiles > 1; }
  int64_t block_bytes(bool) const { return 128 << 10; }

  // Calls add(tile, Constant<rows>, Constant<wide>).
  template <class Add>
  static void call(const Tile& tile, const Add& add) {
    tile.wide ? with_wide_rows<kWideMax>(tile, add) : with_rows<kTileRows>(tile, add);
  }

  const bool wide;
  const int64_t num_tiles, num_rows;

 private:
  template <int kMost, class Add>
  static void with_rows(const Tile& tile, const Add& add) {
    if constexpr (kMost > 1) {
      if (tile.rows < kMost) return with_rows<kMost - 1>(tile, add);
    }
    add(tile, Constant<kMost>(), Constant<false>());
  }
  template <int kRows, class Add>
  static void with_wide_rows(const Tile& tile, const Add& add) {
    if constexpr (kRows >= kWideMin) {
      if (tile.rows < kRows) return with_wide_rows<kRows - 1>(tile, add);
      add(tile, Constant<kRows>(), Constant<true>());
    }
  }
};

// Multiplies some rows by one panel. The memory that is prefetched follows: the next block of K, or the panel of the
// thread's next task. A block leaves room for it in L2.
template <class Tiles, class Args, class Add, class Unpack>
void panel_task(const Args& args, const PanelLayout& layout, int64_t panel_index, int64_t row_begin, int64_t rows,
                const Add& add, Finish<Args> finish, const Unpack& unpack) {
  if (write_excluded_panel(args, row_begin, rows, panel_index)) return;
  Tiles tiles(rows);
  const int64_t panel_bytes = layout.num_steps * layout.step_bytes, num_sums = rows * layout.row_sums;
  const int64_t block_step_bytes = max64(layout.step_bytes, layout.unpacked_bytes);
  const bool cut = tiles.asks() || layout.unpacked_bytes > 0;
  const int64_t num_units = ceil_div(layout.num_steps, Tiles::kStepsTogether);
  const int64_t num_blocks = cut ? min64(num_units, ceil_div(layout.num_steps * block_step_bytes,
                                                             tiles.block_bytes(layout.unpacked_bytes > 0)))
                                 : 1;
  const int64_t unpacked_bytes = ceil_div(num_units, num_blocks) * Tiles::kStepsTogether * layout.unpacked_bytes;
  const char* panel = static_cast<const char*>(static_cast<const void*>(args.panels)) + panel_index * panel_bytes;
  float* sums = static_cast<float*>(
      thread_scratch(static_cast<size_t>(num_sums) * sizeof(float) + static_cast<size_t>(unpacked_bytes)));
  const auto step_at = [&](int64_t b) {
    return min64(layout.num_steps, num_units * b / num_blocks * Tiles::kStepsTogether);
  };
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t begin = step_at(b), end = step_at(b + 1);
    const char* packed = panel + begin * layout.step_bytes;
    char* unpacked = layout.unpacked_bytes > 0 ? static_cast<char*>(static_cast<void*>(sums + num_sums)) : nullptr;
    if (unpacked != nullptr && !layout.tiles_unpack) unpack(packed, end - begin, unpacked);
    const int64_t share = tiles.asks() ? ceil_div((end - begin) * layout.step_bytes, tiles.num_tiles) : 0;
    const int64_t stride = ceil_div(share, max64(1, end - begin));  // a block has a step, which clang-tidy cannot see
    for (int64_t t = 0; t < tiles.num_tiles; ++t) {
      const int64_t first = tiles.begin(t), last = tiles.begin(t + 1);
      const bool unpacks = layout.tiles_unpack && t == 0;
      const char* steps = unpacked == nullptr || unpacks ? packed : unpacked;
      const Tile tile = {row_begin + first,
                         static_cast<int>(last - first),
                         tiles.wide,
                         steps,
                         begin,
                         end,
                         sums + first * layout.row_sums,
                         panel + end * layout.step_bytes + t * share,
                         stride,
                         panel_index,
                         unpacks ? unpacked : nullptr};
      tiles.call(tile, add);
      if (b + 1 == num_blocks) finish(args, {tile.row, last - first, panel_index, tile.sums});
    }
  }
}

inline void keep_packed(const char*, int64_t, void*) {}

// Calls tiles.call(tile, add) over all of the output and its K, and finish(args, FinishedTile) for each tile when its
// sums are complete.
template <class Tiles, class Args, class Add, class Unpack = decltype(keep_packed)>
void for_each_tile(const Args& args, const PanelLayout& layout, const Add& add, Finish<Args> finish,
                   const Unpack& unpack = keep_packed) {
  constexpr int64_t kSmallWork = 1 << 16;
  if (args.num_rows == 0 || args.num_columns == 0) return;
  const int64_t num_panels = ceil_div(args.num_columns, args.gated ? kGatedColumns : kPanelColumns);
  // At most so many rows that their slice of x stays in L2 while a panel passes, and so many that all threads have
  // tasks.
  const auto are_too_many = [&](int64_t rows) {
    return num_panels * ceil_div(args.num_rows, rows) < 2 * num_threads() || rows * args.depth > Tiles::kTaskElements;
  };
  int64_t task_rows = Tiles::kTaskRows;
  while (task_rows > Tiles::kTaskRows / 8 && are_too_many(task_rows)) task_rows /= 2;
  const int64_t row_blocks = ceil_div(args.num_rows, task_rows);
  const int64_t num_units = ceil_div(args.num_rows, Tiles::kRowsTogether);
  const bool parallel = args.num_rows * num_panels * kPanelColumns * args.depth > kSmallWork;
  parallel_for_if(parallel, row_blocks * num_panels, [&](int64_t task) {
    const int64_t block = task / num_panels;
    const auto row_at = [&](int64_t b) {
      return min64(args.num_rows, num_units * b / row_blocks * Tiles::kRowsTogether);
    };
    const int64_t row_begin = row_at(block), row_end = row_at(block + 1);
    panel_task<Tiles>(args, layout, task % num_panels, row_begin, row_end - row_begin, add, finish, unpack);
  });
}

}  // namespace shardline::SHARDLINE_ISA
