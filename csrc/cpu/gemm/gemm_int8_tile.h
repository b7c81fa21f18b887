// Tiles of the GEMM over bytes. Sums are int32, so they are exact in any order. Then come one multiplication by the
// scales of row and column, one addition, and one rounding.
//
// Weights are stored with 128 added, as the unsigned operand of the dot instruction. So a sum starts at -128 times the
// sum of the row's bytes.
#pragma once

#include "gemm/gemm_amx.h"
#include "gemm/gemm_tiles.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {

constexpr int kInt8TileRows = kLanes == 16 ? 6 : 4;

// The numbers of rows whose tile is wide, see gemm_tiles.h.
constexpr int kInt8WideMin = 7, kInt8WideMax = kLanes == 16 ? 10 : 0;

// How many vectors of columns a tile of `rows` holds in registers. AVX-512 has 32 registers, other ISAs have 16.
constexpr int int8_tile_vectors(int rows, bool wide) {
  if (kLanes == 16) return wide ? kWideVectors : 4;
  return rows == 1 ? 4 : 2;
}

template <int kRows, bool kWide>
void add_int8_tile(const QuantizedLinearArgs& args, const Tile& tile) {
  constexpr int kVectors = int8_tile_vectors(kRows, kWide);
  const int64_t x_stride = ceil_div(args.depth, kGroupDepth) * kGroupDepth;
  const int64_t row_sums_stride = ceil_div(args.depth, kGroupDepth) + 1;
  const int8_t* x = args.x + tile.row * x_stride;
  const int64_t begin = tile.begin, end = tile.end;
  Ahead ahead(tile, kPanelColumns / (kVectors * kLanes));
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    int32_t* sums = static_cast<int32_t*>(tile.sums) + column;
    I32 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const I32 start = broadcast_int(-128 * args.row_sums[(tile.row + r) * row_sums_stride]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = begin == 0 ? start : load(sums + r * kPanelColumns + v * kLanes);
      }
    }
    const char* w = tile.steps + column * kQuad;
    for (int64_t q = begin; q < end; ++q) {
      if (asks_ahead(kRows, kWide)) ahead.request();
      I32 quads[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) quads[v] = load_quads(w + ((q - begin) * kPanelColumns + v * kLanes) * kQuad);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const I32 row = broadcast_quad(x + r * x_stride + q * kQuad);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sum[r][v] = dot_quads(sum[r][v], quads[v], row);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * kLanes, sum[r][v]);
    }
  }
}

#if defined(__AMX_INT8__)

// From this many rows on AMX is faster.
constexpr int64_t kAmxInt8Rows = 4;

inline void add_int8_amx_tile(const QuantizedLinearArgs& args, const Tile& tile) {
  const int64_t x_stride = ceil_div(args.depth, kGroupDepth) * kGroupDepth;
  const int64_t row_sums_stride = ceil_div(args.depth, kGroupDepth) + 1;
  int32_t* sums = static_cast<int32_t*>(tile.sums);
  for (int64_t r = 0; tile.begin == 0 && r < tile.rows; ++r) {
    const I32 start = broadcast_int(-128 * args.row_sums[(tile.row + r) * row_sums_stride]);
    for (int64_t c = 0; c < kPanelColumns; c += kLanes) store(sums + r * kPanelColumns + c, start);
  }
  const int8_t* x = args.x + tile.row * x_stride;
  add_amx_tile<ByteProducts>({reinterpret_cast<const char*>(x), x_stride}, x_stride, tile, false);
}

#endif

// Converts such sums to values, for gemm_finish.h.
class Int8Sums {
 public:
  Int8Sums(const QuantizedLinearArgs& args, const FinishedTile& tile)
      : sums_(static_cast<const int32_t*>(tile.sums)),
        row_scales_(args.row_scales + tile.row),
        scales_(args.column_scales + tile.panel * kPanelColumns) {}

  inline auto at(int64_t c) const {
    return [sums = sums_ + c, row_scales = row_scales_, scale = load(scales_ + c)](int64_t r) {
      return to_float(load(sums + r * kPanelColumns)) * (broadcast(row_scales[r]) * scale);
    };
  }

 private:
  const int32_t* const sums_;
  const float *const row_scales_, *const scales_;
};

}  // namespace shardline::SHARDLINE_ISA
