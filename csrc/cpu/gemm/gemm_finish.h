// How the sums of a tile become outputs, rounded once: value + bias, or gated, or the best of the panel, see
// gemm_args.h.
//
// `Values` converts a GEMM's sums: Values(args, tile).at(c)(r) are the values of row r of the tile and of kLanes
// columns of the panel from c on. `finish_of` chooses once per GEMM which of these functions finishes its tiles, since
// a tile takes less than a microsecond.
#pragma once

#include "dispatch/kernels.h"
#include "dispatch/variant.h"
#include "rowwise/activations.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// The sums [rows][64] of rows [row, row + rows) and a panel.
struct FinishedTile {
  int64_t row, rows, panel;
  void* sums;
};

template <class Args>
using Finish = void (*)(const Args&, const FinishedTile&);

// A constant that a lambda can take as an argument and use as a template argument.
template <auto kConstant>
struct Constant {
  static constexpr auto kValue = kConstant;
};

// What is added to the sums: nothing, the same bias in every row, or each row's own, perhaps with a factor of the sum.
enum class Bias { kNone, kShared, kOfRows, kScaledRows };

template <class Column>
struct Biased {
  Column column;
  F32 bias;

  inline F32 operator()(int64_t r) const { return column(r) + bias; }
};

template <class Column>
struct RowBiased {
  Column column;
  const float* bias;
  int64_t stride, left;

  inline F32 operator()(int64_t r) const { return column(r) + load_n(bias + r * stride, left); }
};

// With factor 1, this has the bits of RowBiased.
template <class Column>
struct RowScaled {
  Column column;
  const float* bias;
  int64_t stride, factors, left;

  inline F32 operator()(int64_t r) const {
    const float* at = bias + r * stride;
    return fma(column(r), load_n(at + factors, left), load_n(at, left));
  }
};

// Columns of a tile with their biases. Only the first size() columns of the panel, or of each half of it, belong to the
// weight.
template <class Values, class Args, Bias kBias>
class Columns {
 public:
  Columns(const Args& args, const FinishedTile& tile, int64_t width)
      : values_(args, tile),
        num_columns_(args.num_columns - tile.panel * width),
        bias_dtype_(args.bias_dtype),
        bias_stride_(args.bias_stride),
        factors_(args.factors),
        bias_(static_cast<const char*>(args.bias) + first_bias(args, tile, width)),
        up_bias_(bias_ + (kBias == Bias::kNone ? 0 : args.num_columns * bias_bytes())) {}

  int64_t size() const { return num_columns_; }  // more than the panel has, except for the last panel

  inline auto at(int64_t c) const { return biased(c, bias_, c); }
  inline auto up_at(int64_t c) const { return biased(kGatedColumns + c, up_bias_, c); }

 private:
  int64_t bias_bytes() const { return bias_dtype_ == DType::kFloat32 ? 4 : 2; }

  int64_t first_bias(const Args& args, const FinishedTile& tile, int64_t width) const {
    if (kBias == Bias::kNone) return 0;
    return (tile.panel * width + (kBias == Bias::kShared ? 0 : tile.row * args.bias_stride)) * bias_bytes();
  }

  inline auto biased(int64_t c, const char* bias, int64_t place) const {
    const int64_t left = num_columns_ - place;
    if constexpr (kBias == Bias::kOfRows) {
      const void* at = bias + place * 4;
      return RowBiased<decltype(values_.at(c))>{values_.at(c), static_cast<const float*>(at), bias_stride_, left};
    } else if constexpr (kBias == Bias::kScaledRows) {
      const void* at = bias + place * 4;
      return RowScaled<decltype(values_.at(c))>{values_.at(c), static_cast<const float*>(at), bias_stride_, factors_,
                                                left};
    } else if constexpr (kBias == Bias::kShared) {
      const void* at = bias + place * bias_bytes();
      return Biased<decltype(values_.at(c))>{values_.at(c), bias_dtype_ == DType::kFloat32
                                                                ? load_n(static_cast<const float*>(at), left)
                                                                : load_n(static_cast<const bf16*>(at), left)};
    } else {
      return values_.at(c);
    }
  }

  const Values values_;
  const int64_t num_columns_;
  const DType bias_dtype_;
  const int64_t bias_stride_, factors_;
  const char *const bias_, *const up_bias_;
};

template <class Values, class T, Bias kBias, class Args>
void write_tile(const Args& args, const FinishedTile& tile) {
  const Columns<Values, Args, kBias> columns(args, tile, kPanelColumns);
  T* out = static_cast<T*>(args.out) + tile.row * args.out_stride + tile.panel * kPanelColumns;
  const int64_t stride = args.out_stride, rows = tile.rows;
  if (columns.size() >= kPanelColumns) {
#pragma GCC unroll 8
    for (int64_t c = 0; c < kPanelColumns; c += 2 * kLanes) {
      const auto first = columns.at(c), second = columns.at(c + kLanes);
      for (int64_t r = 0; r < rows; ++r) store_two(out + r * stride + c, first(r), second(r));
    }
    return;
  }
  for (int64_t c = 0; c < columns.size(); c += kLanes) {
    const auto column = columns.at(c);
    for (int64_t r = 0; r < rows; ++r) store_n(out + r * stride + c, column(r), columns.size() - c);
  }
}

// act(gate) * up, of values that were not rounded before.
template <class Values, class T, class Act, Bias kBias, class Args>
void write_gated_tile(const Args& args, const FinishedTile& tile) {
  const Columns<Values, Args, kBias> columns(args, tile, kGatedColumns);
  T* out = static_cast<T*>(args.out) + tile.row * args.out_stride + tile.panel * kGatedColumns;
  const int64_t stride = args.out_stride, rows = tile.rows;
  if (columns.size() < kGatedColumns) {
    for (int64_t c = 0; c < columns.size(); c += kLanes) {
      const auto gate = columns.at(c), up = columns.up_at(c);
      for (int64_t r = 0; r < rows; ++r) {
        store_n(out + r * stride + c, activated(Act(), gate(r)) * multiplier(Act(), up(r)), columns.size() - c);
      }
    }
    return;
  }
  for (int64_t c = 0; c < kGatedColumns; c += 2 * kLanes) {
    const auto gate = columns.at(c), next_gate = columns.at(c + kLanes);
    const auto up = columns.up_at(c), next_up = columns.up_at(c + kLanes);
    const auto gate_rows = [&](int64_t first, auto num_rows) {
      constexpr int kRows = num_rows.kValue;
      F32 factor[2 * kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        factor[2 * r] = gate(first + r);
        factor[2 * r + 1] = next_gate(first + r);
      }
      Act::apply(factor);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        store_two(out + (first + r) * stride + c, factor[2 * r] * multiplier(Act(), up(first + r)),
                  factor[2 * r + 1] * multiplier(Act(), next_up(first + r)));
      }
    };
    constexpr int kTogether = kLanes == 16 ? 2 : 1;  // latencies overlap, and the registers suffice
    int64_t r = 0;
    for (; r + kTogether <= rows; r += kTogether) gate_rows(r, Constant<kTogether>());
    if (r < rows) gate_rows(r, Constant<1>());
  }
}

// The bits of the columns of a panel that may win in a row of `args.allowed`.
template <class Args>
uint64_t allowed_columns(const Args& args, int64_t row, int64_t panel) {
  return args.allowed[row * (args.out_stride / 2) + panel];
}

// `value` where the lowest bits are set, and -inf elsewhere.
inline F32 keep_allowed(F32 value, uint64_t bits) {
  const I32 lane_bits = broadcast_int(1) << lane_numbers(AllLanes());
  return (broadcast_int(static_cast<int32_t>(bits)) & lane_bits) != 0 ? value : broadcast(-__builtin_inff());
}

// Writes each row's largest value and, half an output row further, its column; the lowest column on ties. As in
// `argmax`, NaN loses to everything else. If kMasked, columns that are not allowed have the value -inf.
template <class Values, Bias kBias, bool kMasked, class Args>
void write_best_of_tile(const Args& args, const FinishedTile& tile) {
  const Columns<Values, Args, kBias> all(args, tile, kPanelColumns);
  const int64_t columns = min64(kPanelColumns, all.size()), first_column = tile.panel * kPanelColumns;
  float* out = static_cast<float*>(args.out) + tile.row * args.out_stride + tile.panel;
  F32 lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<float>(lane);
  for (int64_t r = 0; r < tile.rows; ++r, out += args.out_stride) {
    float values[kPanelColumns];
    F32 best = broadcast(-__builtin_inff()), places = {};
    const uint64_t allowed = kMasked ? allowed_columns(args, tile.row + r, tile.panel) : ~uint64_t{0};
    for (int64_t c = 0; c < columns; c += kLanes) {
      const F32 value = kMasked ? keep_allowed(all.at(c)(r), allowed >> c) : all.at(c)(r);
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
    __builtin_memcpy(out + args.out_stride / 2, &column, sizeof column);
  }
}

// Whether no row [row, row + rows) allows any column of a panel. Then this writes what `write_best_of_tile` would
// write, and the panel need not be multiplied.
template <class Args>
bool write_excluded_panel(const Args& args, int64_t row, int64_t rows, int64_t panel) {
  if (!args.best || args.allowed == nullptr) return false;
  uint64_t allowed = 0;
  for (int64_t r = row; r < row + rows; ++r) allowed |= allowed_columns(args, r, panel);
  if (allowed != 0) return false;
  const auto column = static_cast<int32_t>(panel * kPanelColumns);
  float* out = static_cast<float*>(args.out) + row * args.out_stride + panel;
  for (int64_t r = 0; r < rows; ++r, out += args.out_stride) {
    out[0] = -__builtin_inff();
    __builtin_memcpy(out + args.out_stride / 2, &column, sizeof column);
  }
  return true;
}

template <class Values, class T, Bias kBias, class Args>
Finish<Args> finish_as(const Args& args) {
  if (!args.gated) return write_tile<Values, T, kBias, Args>;
  Finish<Args> finish = nullptr;
  with_activation(args.activation, [&](auto act) { finish = write_gated_tile<Values, T, decltype(act), kBias, Args>; });
  return finish;
}

template <class Values, Bias kBias, class Args>
Finish<Args> finish_with(const Args& args) {
  if (args.best && args.allowed != nullptr) return write_best_of_tile<Values, kBias, true, Args>;
  if (args.best) return write_best_of_tile<Values, kBias, false, Args>;
  return args.out_dtype == DType::kFloat32 ? finish_as<Values, float, kBias>(args)
                                           : finish_as<Values, bf16, kBias>(args);
}

// The function that finishes the tiles of a GEMM. The best of a panel is not looked for where rows have own biases.
template <class Values, class Args>
Finish<Args> finish_of(const Args& args) {
  if (args.bias == nullptr) return finish_with<Values, Bias::kNone>(args);
  if (args.bias_stride == 0) return finish_with<Values, Bias::kShared>(args);
  if (args.factors != 0) {
    return args.out_dtype == DType::kFloat32 ? finish_as<Values, float, Bias::kScaledRows>(args)
                                             : finish_as<Values, bf16, Bias::kScaledRows>(args);
  }
  return args.out_dtype == DType::kFloat32 ? finish_as<Values, float, Bias::kOfRows>(args)
                                           : finish_as<Values, bf16, Bias::kOfRows>(args);
}

}  // namespace shardline::SHARDLINE_ISA
