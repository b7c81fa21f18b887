// Rows times a panel in the tile registers of AMX (Sapphire Rapids and later), for bf16 and for bytes.
//
// A tile register holds 16 rows of 64 bytes. Panels lie in memory as AMX reads weights: a row of 16 columns with 4
// bytes each, which are 2 neighbours along K of bf16 or 4 bytes. So a step has 32 bf16 or 64 bytes of K. A step of
// bf16 adds
//
//   sum += (x0 w0 + x2 w2 + ... + x30 w30) + (x1 w1 + x3 w3 + ... + x31 w31)
//
// where each bracket is a chain of fused multiply-adds from zero. The end of K is padded with zeros.
#pragma once

#if defined(__AMX_TILE__)

#include "gemm/gemm_tiles.h"
#include "simd/amx.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kAmxColumns = 16;
constexpr int64_t kPanelRowBytes = kPanelColumns * 4, kAmxStepBytes = kAmxRows * kPanelRowBytes;

// The tiles of rows that use these registers. A step of AMX has `kSteps` steps of the panel.
template <int64_t kSteps = kAmxRows>
struct AmxTiles {
  static constexpr int64_t kRowsTogether = 2 * kAmxRows, kStepsTogether = kSteps;
  static constexpr int64_t kTaskRows = 8 * kRowsTogether;
  static constexpr int64_t kTaskElements = 1 << 20;  // of x, which stay in L2

  explicit AmxTiles(int64_t rows) : num_tiles(ceil_div(rows, kRowsTogether)), num_rows(rows) {}
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;

  int64_t begin(int64_t t) const { return min64(t * kRowsTogether, num_rows); }
  bool asks() const { return true; }
  // Many tiles read a block from L1, and a tile that unpacks a block finds it there. Other tiles prefetch the next
  // block while they read this one.
  int64_t block_bytes(bool unpacks) const {
    if (unpacks && num_tiles == 1) return 16 << 10;
    return unpacks || num_tiles >= 4 ? 32 << 10 : 128 << 10;
  }

  template <class Add>
  void call(const Tile& tile, const Add& add) {
    if (tile.rows != configured_) configure_tiles(tile.rows);
    configured_ = tile.rows;
    add(tile);
  }

  static constexpr bool wide = false;
  const int64_t num_tiles, num_rows;

 private:
  int configured_ = 0;  // rows
};

struct Bf16Products {
  static inline void add_two_by_two() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  static inline void add_first() { _tile_dpbf16ps(0, 4, 5); }
  static inline void add_second() { _tile_dpbf16ps(1, 4, 6); }
  static inline void add_third() { _tile_dpbf16ps(2, 4, 7); }
  static inline void add_fourth() { _tile_dpbf16ps(3, 4, 5); }
};

// Signed bytes of x times unsigned bytes of weights.
struct ByteProducts {
  static inline void add_two_by_two() {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(3, 5, 7);
  }
  static inline void add_first() { _tile_dpbsud(0, 4, 5); }
  static inline void add_second() { _tile_dpbsud(1, 4, 6); }
  static inline void add_third() { _tile_dpbsud(2, 4, 7); }
  static inline void add_fourth() { _tile_dpbsud(3, 4, 5); }
};

// The rows of a tile as AMX reads them: `bytes` of each row, from the first step of a block on.
struct AmxRowsOfX {
  const char* data;
  int64_t stride;
};

// Adds one step of 32 columns or of all columns.
template <class Products>
inline void add_two_by_two(const AmxRowsOfX& x, const char* w) {
  _tile_loadd(6, w, kPanelRowBytes);
  _tile_loadd(4, x.data, x.stride);
  _tile_loadd(5, x.data + kAmxRows * x.stride, x.stride);
  _tile_loadd(7, w + kAmxRowBytes, kPanelRowBytes);
  Products::add_two_by_two();
}
template <class Products>
inline void add_one_by_four(const AmxRowsOfX& x, const char* w) {
  _tile_loadd(4, x.data, x.stride);
  _tile_loadd(5, w, kPanelRowBytes);
  Products::add_first();
  _tile_loadd(6, w + kAmxRowBytes, kPanelRowBytes);
  Products::add_second();
  _tile_loadd(7, w + 2 * kAmxRowBytes, kPanelRowBytes);
  Products::add_third();
  _tile_loadd(5, w + 3 * kAmxRowBytes, kPanelRowBytes);
  Products::add_fourth();
}

// The last step of K, if it is not whole, padded with zeros.
struct AmxLastStep {
  AmxLastStep(const AmxRowsOfX& rows, int num_rows, int64_t row_bytes, const char* w, int64_t panel_rows) {
    for (int r = 0; r < num_rows; ++r) {
      __builtin_memcpy(x[r], rows.data + r * rows.stride, static_cast<size_t>(row_bytes));
    }
    __builtin_memcpy(weights, w, static_cast<size_t>(panel_rows * kPanelRowBytes));
  }

  alignas(64) char x[2 * kAmxRows][kAmxRowBytes] = {};
  alignas(64) char weights[kAmxStepBytes] = {};
};

// The sums of up to 32 rows and 32 columns, or of up to 16 rows and all columns of a panel, in tiles 0 to 3.
struct AmxSums {
  AmxSums(char* data, int64_t stride, bool is_tall)
      : stride(stride),
        at{data, data + kAmxRowBytes, is_tall ? data + kAmxRows * stride : data + 2 * kAmxRowBytes,
           is_tall ? data + kAmxRows * stride + kAmxRowBytes : data + 3 * kAmxRowBytes} {}

  void begin(bool from_zero) const {
    if (from_zero) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    finish_stores(at[0]);
    _tile_loadd(0, at[0], stride);
    _tile_loadd(1, at[1], stride);
    _tile_loadd(2, at[2], stride);
    _tile_loadd(3, at[3], stride);
  }
  void end() const {
    _tile_stored(0, at[0], stride);
    _tile_stored(1, at[1], stride);
    _tile_stored(2, at[2], stride);
    _tile_stored(3, at[3], stride);
  }

  const int64_t stride;
  char* const at[4];
};

// Adds the steps of a tile to its sums, which have `row_sums` places a row; they may begin from zero. `x` is the tile's
// first row, and `depth_bytes` are the bytes of a row.
template <class Products>
void add_amx_tile(const AmxRowsOfX& x, int64_t depth_bytes, const Tile& tile, bool from_zero,
                  int64_t row_sums = kPanelColumns) {
  const int64_t bytes = min64(tile.end * 4, depth_bytes) - tile.begin * 4;
  const int64_t num_steps = bytes / kAmxRowBytes, rest = bytes % kAmxRowBytes;
  const AmxRowsOfX rows = {x.data + tile.begin * 4, x.stride};
  const bool is_tall = tile.rows > kAmxRows;
  const int64_t width = is_tall ? 2 * kAmxColumns : kPanelColumns;
  const int64_t lines = ceil_div(tile.ahead_stride * kAmxRows * width, kCacheLine * kPanelColumns);
  const char* ahead = tile.ahead;
  finish_stores(tile.steps);
  for (int64_t column = 0; column < kPanelColumns; column += width) {
    const AmxSums sums(static_cast<char*>(tile.sums) + column * 4, row_sums * 4, is_tall);
    sums.begin(from_zero);
    const auto add = [&](const AmxRowsOfX& step_rows, const char* w) {
      is_tall ? add_two_by_two<Products>(step_rows, w + column * 4) : add_one_by_four<Products>(step_rows, w);
    };
    for (int64_t s = 0; s < num_steps; ++s) {
      for (int64_t i = 0; i < lines; ++i, ahead += kCacheLine) __builtin_prefetch(ahead, 0, kToL2);
      add({rows.data + s * kAmxRowBytes, rows.stride}, tile.steps + s * kAmxStepBytes);
    }
    if (rest > 0) {
      const int64_t panel_rows = tile.end - tile.begin - num_steps * kAmxRows;
      const AmxLastStep last({rows.data + num_steps * kAmxRowBytes, rows.stride}, tile.rows, rest,
                             tile.steps + num_steps * kAmxStepBytes, panel_rows);
      finish_stores(&last);
      add({last.x[0], kAmxRowBytes}, last.weights);
    }
    sums.end();
  }
}

}  // namespace shardline::SHARDLINE_ISA

#endif
