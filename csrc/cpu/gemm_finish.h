// How a tile's sums become outputs: value + bias, rounded once; or gated, see kernels.h.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace shardline::SHARDLINE_ISA {

// Sums [rows][64] of rows [row, row + rows) and a panel.
struct FinishedTile {
  int64_t row, rows, panel;
  void* sums;
};

// Values [rows][64] as a gated GEMM computes them, not yet rounded.
struct GatedSums {
  const float* values;
  int64_t rows, columns;
  void* out;  // [rows][columns]
  int64_t out_stride;
};

void gate(Activation activation, DType dtype, const GatedSums& tile);

// Not inline: a task's loops have no registers to spare for it.
#define SHARDLINE_APART __attribute__((noinline))

template <class Args>
inline F32 with_bias(const Args& args, F32 value, int64_t column, int64_t n) {
  if (args.bias == nullptr) return value;
  return value + (args.bias_dtype == DType::kFloat32 ? load_n(static_cast<const float*>(args.bias) + column, n)
                                                     : load_n(static_cast<const bf16*>(args.bias) + column, n));
}

template <class T, bool kWhole, class Args, class Value>
SHARDLINE_APART void write_rows(const Args& args, const FinishedTile& tile, const Value& value_at) {
  const int64_t begin = tile.panel * kPanelColumns;
  const int64_t columns = kWhole ? kPanelColumns : min64(kPanelColumns, args.num_columns - begin);
  for (int64_t r = 0; r < tile.rows; ++r) {
    T* out = static_cast<T*>(args.out) + (tile.row + r) * args.out_stride + begin;
    const auto value = [&](int64_t c) { return with_bias(args, value_at(r, c), begin + c, columns - c); };
    if constexpr (kWhole) {
#pragma GCC unroll 8
      for (int64_t c = 0; c < kPanelColumns; c += 2 * kLanes) store_two(out + c, value(c), value(c + kLanes));
    } else {
      for (int64_t c = 0; c < columns; c += kLanes) store_n(out + c, value(c), columns - c);
    }
  }
}

template <class Args, class Value>
SHARDLINE_APART void write_gated_rows(const Args& args, const FinishedTile& tile, bool as_they_are,
                                      const Value& value_at) {
  const int64_t begin = tile.panel * kGatedColumns;
  const int64_t columns = min64(kGatedColumns, args.num_columns - begin);
  float* values = static_cast<float*>(tile.sums);
  for (int64_t r = 0; r < tile.rows && !(as_they_are && args.bias == nullptr); ++r) {
    for (int64_t part = 0; part < 2; ++part) {
      for (int64_t c = 0; c < columns; c += kLanes) {
        const int64_t place = part * kGatedColumns + c;
        const F32 value = with_bias(args, value_at(r, place), part * args.num_columns + begin + c, columns - c);
        store(values + r * kPanelColumns + place, value);
      }
    }
  }
  const int64_t place = tile.row * args.out_stride + begin;
  char* out = static_cast<char*>(args.out) + place * static_cast<int64_t>(args.out_dtype == DType::kFloat32 ? 4 : 2);
  gate(args.activation, args.out_dtype, {values, tile.rows, columns, out, args.out_stride});
}

// value_at(r, c): a row of the tile and kLanes columns of the panel, as floats; `as_they_are`: the sums are these.
template <class Args, class Value>
void finish_tile(const Args& args, const FinishedTile& tile, bool as_they_are, const Value& value_at) {
  if (args.gated) return write_gated_rows(args, tile, as_they_are, value_at);
  const bool whole = (tile.panel + 1) * kPanelColumns <= args.num_columns;
  if (args.out_dtype == DType::kFloat32) return write_rows<float, false>(args, tile, value_at);
  whole ? write_rows<bf16, true>(args, tile, value_at) : write_rows<bf16, false>(args, tile, value_at);
}

}  // namespace shardline::SHARDLINE_ISA
