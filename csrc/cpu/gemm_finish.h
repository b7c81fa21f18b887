// How a tile's sums become outputs: value + bias, rounded once; or gated, or the best of the panel, see kernels.h.
#pragma once

#include "kernels.h"
#include "variant.h"
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

// What is added to the columns of a product.
struct Bias {
  DType dtype;
  const void* values;  // null for nothing

  inline F32 add_to(F32 value, int64_t column, int64_t n) const {
    if (values == nullptr) return value;
    return value + (dtype == DType::kFloat32 ? load_n(static_cast<const float*>(values) + column, n)
                                             : load_n(static_cast<const bf16*>(values) + column, n));
  }
};

// Functions of their own, and everything by value: a task's loops have no registers to spare, and what is stored could
// otherwise change what is read.
template <class T, bool kWhole, class Value>
__attribute__((noinline)) void write_rows(T* out, int64_t out_stride, int64_t rows, int64_t first_column,
                                          int64_t columns, Bias bias, Value value_at) {
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    if constexpr (kWhole) {
      const auto value = [&](int64_t c) { return bias.add_to(value_at(r, c), first_column + c, kLanes); };
#pragma GCC unroll 8
      for (int64_t c = 0; c < kPanelColumns; c += 2 * kLanes) store_two(out + c, value(c), value(c + kLanes));
    } else {
      for (int64_t c = 0; c < columns; c += kLanes) {
        store_n(out + c, bias.add_to(value_at(r, c), first_column + c, columns - c), columns - c);
      }
    }
  }
}

template <class T, class Args, class Value>
void write_tile(const Args& args, const FinishedTile& tile, const Value& value_at) {
  const int64_t column = tile.panel * kPanelColumns;
  const int64_t columns = min64(kPanelColumns, args.num_columns - column);
  T* out = static_cast<T*>(args.out) + tile.row * args.out_stride + column;
  const Bias bias = {args.bias_dtype, args.bias};
  columns == kPanelColumns
      ? write_rows<T, true>(out, args.out_stride, tile.rows, column, columns, bias, value_at)
      : write_rows<T, false>(out, args.out_stride, tile.rows, column, columns, bias, value_at);
}

// Values [rows][64] for the gate and for up, in place of the sums; up's bias lies `up_bias` behind the gate's.
template <bool kWhole, class Value>
__attribute__((noinline)) void write_values(float* values, int64_t rows, int64_t first_column, int64_t columns,
                                            int64_t up_bias, Bias bias, Value value_at) {
  for (int64_t r = 0; r < rows; ++r, values += kPanelColumns) {
#pragma GCC unroll 8
    for (int64_t c = 0; c < kGatedColumns; c += kLanes) {
      const int64_t n = kWhole ? kLanes : columns - c, column = first_column + c, up = kGatedColumns + c;
      if (n <= 0) break;
      store(values + c, bias.add_to(value_at(r, c), column, n));
      store(values + up, bias.add_to(value_at(r, up), up_bias + column, n));
    }
  }
}

template <class Args, class Value>
void write_gated_tile(const Args& args, const FinishedTile& tile, bool as_they_are, const Value& value_at) {
  const int64_t column = tile.panel * kGatedColumns;
  const int64_t columns = min64(kGatedColumns, args.num_columns - column);
  float* values = static_cast<float*>(tile.sums);
  const Bias bias = {args.bias_dtype, args.bias};
  if (!as_they_are || args.bias != nullptr) {
    columns == kGatedColumns
        ? write_values<true>(values, tile.rows, column, columns, args.num_columns, bias, value_at)
        : write_values<false>(values, tile.rows, column, columns, args.num_columns, bias, value_at);
  }
  const int64_t place = tile.row * args.out_stride + column;
  char* out = static_cast<char*>(args.out) + place * static_cast<int64_t>(args.out_dtype == DType::kFloat32 ? 4 : 2);
  gate(args.activation, args.out_dtype, {values, tile.rows, columns, out, args.out_stride});
}

// Each row's largest value, and its column, which lies `to_columns` behind; the lowest column on ties. As in `argmax`,
// NaN loses to everything else.
template <class Value>
__attribute__((noinline)) void write_best(float* out, int64_t out_stride, int64_t to_columns, int64_t rows,
                                          int64_t first_column, int64_t columns, Bias bias, Value value_at) {
  F32 lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<float>(lane);
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    float values[kPanelColumns];
    F32 best = broadcast(-__builtin_inff()), places = {};
    for (int64_t c = 0; c < columns; c += kLanes) {
      const F32 value = bias.add_to(value_at(r, c), first_column + c, columns - c);
      store(values + c, value);
      places = value > best ? lanes + static_cast<float>(c) : places;
      best = value > best ? value : best;
    }
    const float top = max_lanes(best);
    const F32 of_top = best == broadcast(top) ? places : broadcast(kPanelColumns);
    const bool simple = columns == kPanelColumns && top > -__builtin_inff();
    const int64_t place = simple ? static_cast<int64_t>(-max_lanes(-of_top)) : argmax(values, columns);
    const auto column = static_cast<int32_t>(first_column + place);
    out[0] = values[place];
    __builtin_memcpy(out + to_columns, &column, sizeof column);
  }
}

template <class Args, class Value>
void write_best_of_tile(const Args& args, const FinishedTile& tile, const Value& value_at) {
  const int64_t column = tile.panel * kPanelColumns;
  float* out = static_cast<float*>(args.out) + tile.row * args.out_stride + tile.panel;
  write_best(out, args.out_stride, args.out_stride / 2, tile.rows, column, min64(kPanelColumns, args.num_columns - column),
             {args.bias_dtype, args.bias}, value_at);
}

// value_at(r, c): a row of the tile and kLanes columns of the panel, as floats; `as_they_are`: the sums are these.
template <class Args, class Value>
void finish_tile(const Args& args, const FinishedTile& tile, bool as_they_are, const Value& value_at) {
  if (args.best) return write_best_of_tile(args, tile, value_at);
  if (args.gated) return write_gated_tile(args, tile, as_they_are, value_at);
  args.out_dtype == DType::kFloat32 ? write_tile<float>(args, tile, value_at) : write_tile<bf16>(args, tile, value_at);
}

}  // namespace shardline::SHARDLINE_ISA
