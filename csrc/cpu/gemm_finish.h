// How a tile's sums become outputs, rounded once: value + bias; or gated, or the best of the panel, see kernels.h.
#pragma once

#include "activations.h"
#include "kernels.h"
#include "variant.h"
#include "vec.h"

namespace shardline::SHARDLINE_ISA {

// Sums [rows][64] of rows [row, row + rows) and a panel.
struct FinishedTile {
  int64_t row, rows, panel;
  void* sums;
};

// A constant that a lambda may take, as its template argument.
template <auto kConstant>
struct Constant {
  static constexpr auto kValue = kConstant;
};

// A panel's values with the bias of their columns, of which the panel has `columns`; up's lies `up` behind the gate's.
template <class Value>
struct Biased {
  Value value_at;
  DType dtype;
  const void* bias;
  int64_t columns, up;

  inline F32 operator()(int64_t r, int64_t c) const {
    const bool is_up = up > 0 && c >= kGatedColumns;
    const int64_t column = is_up ? c - kGatedColumns : c, place = is_up ? up + column : column;
    return value_at(r, c) + (dtype == DType::kFloat32
                                 ? load_n(static_cast<const float*>(bias) + place, columns - column)
                                 : load_n(static_cast<const bf16*>(bias) + place, columns - column));
  }
};

// Functions of their own, and everything by value: a task's loops have no registers to spare, and what is stored could
// otherwise change what is read.
template <class T, bool kWhole, class Value>
__attribute__((noinline)) void write_rows(T* out, int64_t out_stride, int64_t rows, int64_t columns, Value value_at) {
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    if constexpr (kWhole) {
#pragma GCC unroll 8
      for (int64_t c = 0; c < kPanelColumns; c += 2 * kLanes) store_two(out + c, value_at(r, c), value_at(r, c + kLanes));
    } else {
      for (int64_t c = 0; c < columns; c += kLanes) store_n(out + c, value_at(r, c), columns - c);
    }
  }
}

// act(gate) * up of `rows` rows of a panel, from what was not rounded before.
template <class T, class Act, class Value>
__attribute__((noinline)) void gate_rows(T* out, int64_t out_stride, int64_t rows, int64_t columns, Value value_at) {
  constexpr int kVectors = kGatedColumns / kLanes;
  if (columns < kGatedColumns) {
    for (int64_t r = 0; r < rows; ++r, out += out_stride) {
      for (int64_t c = 0; c < columns; c += kLanes) {
        store_n(out + c, activated(Act(), value_at(r, c)) * value_at(r, kGatedColumns + c), columns - c);
      }
    }
    return;
  }
  const auto gate_some = [&](int64_t first, auto num_rows) {
    constexpr int kCount = num_rows.kValue * kVectors;
    F32 gate[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) gate[i] = value_at(first + i / kVectors, i % kVectors * kLanes);
    Act::apply(gate);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; i += 2) {
      const int64_t r = first + i / kVectors, c = i % kVectors * kLanes;
      store_two(out + r * out_stride + c, gate[i] * value_at(r, kGatedColumns + c),
                gate[i + 1] * value_at(r, kGatedColumns + c + kLanes));
    }
  };
  constexpr int kTogether = kVectors <= 2 ? 2 : 1;  // rows: latencies overlap, registers suffice
  int64_t r = 0;
  for (; r + kTogether <= rows; r += kTogether) gate_some(r, Constant<kTogether>());
  if (r < rows) gate_some(r, Constant<1>());
}

template <class T, class Args, class Value>
void write_tile(const Args& args, const FinishedTile& tile, int64_t columns, const Value& value_at) {
  T* out = static_cast<T*>(args.out) + tile.row * args.out_stride + tile.panel * kPanelColumns;
  columns == kPanelColumns ? write_rows<T, true>(out, args.out_stride, tile.rows, columns, value_at)
                           : write_rows<T, false>(out, args.out_stride, tile.rows, columns, value_at);
}

template <class T, class Args, class Value>
void write_gated_tile(const Args& args, const FinishedTile& tile, int64_t columns, const Value& value_at) {
  T* out = static_cast<T*>(args.out) + tile.row * args.out_stride + tile.panel * kGatedColumns;
  with_activation(args.activation, [&](auto act) {
    gate_rows<T, decltype(act)>(out, args.out_stride, tile.rows, columns, value_at);
  });
}

// Each row's largest value, and its column, which lies `to_columns` behind; the lowest column on ties. As in `argmax`,
// NaN loses to everything else.
template <class Value>
__attribute__((noinline)) void write_best(float* out, int64_t out_stride, int64_t to_columns, int64_t rows,
                                          int64_t first_column, int64_t columns, Value value_at) {
  F32 lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<float>(lane);
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    float values[kPanelColumns];
    F32 best = broadcast(-__builtin_inff()), places = {};
    for (int64_t c = 0; c < columns; c += kLanes) {
      const F32 value = value_at(r, c);
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
void write_finished(const Args& args, const FinishedTile& tile, int64_t columns, const Value& value_at) {
  const bool floats = args.out_dtype == DType::kFloat32;
  if (args.best) {
    float* out = static_cast<float*>(args.out) + tile.row * args.out_stride + tile.panel;
    write_best(out, args.out_stride, args.out_stride / 2, tile.rows, tile.panel * kPanelColumns, columns, value_at);
  } else if (args.gated) {
    floats ? write_gated_tile<float>(args, tile, columns, value_at)
           : write_gated_tile<bf16>(args, tile, columns, value_at);
  } else {
    floats ? write_tile<float>(args, tile, columns, value_at) : write_tile<bf16>(args, tile, columns, value_at);
  }
}

// value_at(r, c): a row of the tile and kLanes columns of the panel, as floats.
template <class Args, class Value>
void finish_tile(const Args& args, const FinishedTile& tile, const Value& value_at) {
  const int64_t width = args.gated ? kGatedColumns : kPanelColumns, first_column = tile.panel * width;
  const int64_t columns = min64(width, args.num_columns - first_column);
  if (args.bias == nullptr) return write_finished(args, tile, columns, value_at);
  const int64_t item = args.bias_dtype == DType::kFloat32 ? 4 : 2;
  const void* bias = static_cast<const char*>(args.bias) + first_column * item;
  const Biased<Value> biased = {value_at, args.bias_dtype, bias, columns, args.gated ? args.num_columns : 0};
  write_finished(args, tile, columns, biased);
}

}  // namespace shardline::SHARDLINE_ISA
