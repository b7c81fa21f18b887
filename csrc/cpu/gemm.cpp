// out[M, N] = x[M, K] weight[N, K]^T + bias. Every output is one chain of multiply-adds over k = 0..K-1 in that order,
// in fp32, then one rounding: tiling over rows, columns and blocks of K only decides when a link is added, never which.
#include "thread_pool.h"
#include "variant.h"
#include "vec.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// Rows of a tile, so that sums and operands fit the registers: bf16 without a dot instruction needs more operands.
template <class T>
constexpr int kTileRows = sizeof(T) == 4 || kHasBf16Dot ? 6 : kLanes == 16 ? 5 : 4;
constexpr int64_t kTaskRows = 240;    // at most: their slice of x stays in L2 while a panel passes
constexpr int64_t kDepthSteps = 256;  // 64 KB of a panel
constexpr int64_t kSmallWork = 1 << 15;

// Sums of a task wait here between blocks of K; storing and loading an fp32 changes nothing.
using Sums = float;

template <class T>
constexpr int64_t kStep = sizeof(T) == 2 ? 2 : 1;  // bf16 advances by pairs of k

// How many vectors of columns a tile of `rows` holds in registers: 32 with AVX-512, else 16.
constexpr int tile_vectors(int rows) {
  if (kLanes == 16) return 4;
  return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

inline I32 broadcast_pair(const bf16* x, bool whole) {
  uint32_t pair = x[0].bits;
  if (whole) pair |= uint32_t{x[1].bits} << 16;
  return broadcast_int(static_cast<int32_t>(pair));
}

inline I32 broadcast_pair(const bf16* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return broadcast_int(pair);
}

template <int kRows, int kVectors>
inline void accumulate(const float* x, int64_t x_stride, const float* w, int64_t begin, int64_t end, int64_t,
                       F32 (&sum)[kRows][kVectors]) {
  for (int64_t k = begin; k < end; ++k) {
    F32 column[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) column[v] = load(w + k * kPanelColumns + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 row = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(row, column[v], sum[r][v]);
    }
  }
}

template <int kRows, int kVectors>
inline void accumulate(const bf16* x, int64_t x_stride, const bf16* w, int64_t begin, int64_t end, int64_t depth,
                       F32 (&sum)[kRows][kVectors]) {
  const int64_t whole_end = min64(end, depth / 2);
  for (int64_t pair = begin; pair < whole_end; ++pair) {
    I32 column[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) column[v] = load_pairs(w + (pair * kPanelColumns + v * kLanes) * 2);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 row = broadcast_pair(x + r * x_stride + pair * 2);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = dot_pairs(sum[r][v], row, column[v]);
    }
  }
  if (whole_end < end) {  // an odd K ends with half a pair; the panel holds a zero there
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 row = broadcast_pair(x + r * x_stride + whole_end * 2, false);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = dot_pairs(sum[r][v], row, load_pairs(w + (whole_end * kPanelColumns + v * kLanes) * 2));
      }
    }
  }
}

template <class T, int kRows>
void tile(const T* x, int64_t x_stride, const T* panel, int64_t begin, int64_t end, int64_t depth, Sums* sums) {
  constexpr int kVectors = tile_vectors(kRows);
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    F32 sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = begin == 0 ? F32{} : load(sums + r * kPanelColumns + column + v * kLanes);
      }
    }
    accumulate<kRows, kVectors>(x, x_stride, panel + column * kStep<T>, begin, end, depth, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + column + v * kLanes, sum[r][v]);
    }
  }
}

template <class T>
void tile_of(int rows, const T* x, int64_t x_stride, const T* panel, int64_t begin, int64_t end, int64_t depth,
             Sums* sums) {
  switch (rows) {
    case 1: return tile<T, 1>(x, x_stride, panel, begin, end, depth, sums);
    case 2: return tile<T, 2>(x, x_stride, panel, begin, end, depth, sums);
    case 3: return tile<T, 3>(x, x_stride, panel, begin, end, depth, sums);
    case 4: return tile<T, 4>(x, x_stride, panel, begin, end, depth, sums);
    case 5: return tile<T, 5>(x, x_stride, panel, begin, end, depth, sums);
    default: return tile<T, 6>(x, x_stride, panel, begin, end, depth, sums);
  }
}

template <class Out>
void finish_row(const LinearArgs& args, const Sums* sums, int64_t row, int64_t column_begin) {
  const int64_t columns = min64(kPanelColumns, args.num_columns - column_begin);
  Out* out = static_cast<Out*>(args.out) + row * args.out_stride + column_begin;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = columns - c;
    F32 value = load(sums + c);
    if (args.bias != nullptr) {
      value = value + (args.bias_dtype == DType::kFloat32
                           ? load_n(static_cast<const float*>(args.bias) + column_begin + c, n)
                           : load_n(static_cast<const bf16*>(args.bias) + column_begin + c, n));
    }
    store_n(out + c, value, n);
  }
}

template <class T>
void linear_task(const LinearArgs& args, int64_t panel_index, int64_t row_begin, int64_t row_end) {
  const int64_t steps = ceil_div(args.depth, kStep<T>);
  const T* panel = static_cast<const T*>(args.panels) + panel_index * steps * kStep<T> * kPanelColumns;
  const T* x = static_cast<const T*>(args.x);
  const int64_t rows = row_end - row_begin;
  const int64_t num_tiles = ceil_div(rows, kTileRows<T>);
  Sums* sums = static_cast<Sums*>(thread_scratch(static_cast<size_t>(rows * kPanelColumns) * sizeof(Sums)));
  for (int64_t begin = 0; begin < steps; begin += kDepthSteps) {
    const int64_t end = min64(steps, begin + kDepthSteps);
    for (int64_t t = 0; t < num_tiles; ++t) {  // evenly: 8 rows are 4 + 4, not 6 + 2
      const int64_t first = rows * t / num_tiles;
      const int64_t last = rows * (t + 1) / num_tiles;
      tile_of<T>(static_cast<int>(last - first), x + (row_begin + first) * args.x_stride, args.x_stride, panel, begin,
                 end, args.depth, sums + first * kPanelColumns);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Sums* row_sums = sums + r * kPanelColumns;
    if (args.out_dtype == DType::kFloat32) {
      finish_row<float>(args, row_sums, row_begin + r, panel_index * kPanelColumns);
    } else {
      finish_row<bf16>(args, row_sums, row_begin + r, panel_index * kPanelColumns);
    }
  }
}

template <class T>
void pack_panel(const PackArgs& args, int64_t panel_index) {
  const T* weight = static_cast<const T*>(args.weight);
  const int64_t padded_depth = ceil_div(args.depth, kStep<T>) * kStep<T>;
  T* panel = static_cast<T*>(args.panels) + panel_index * padded_depth * kPanelColumns;
  constexpr int64_t kChunk = 64;  // a chunk of the panel stays in L1 while the columns are read one after another
  for (int64_t begin = 0; begin < padded_depth; begin += kChunk) {
    const int64_t end = min64(padded_depth, begin + kChunk);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const int64_t column = panel_index * kPanelColumns + c;
      const int64_t known_end = column < args.num_columns ? min64(end, args.depth) : begin;
      for (int64_t k = begin; k < end; ++k) {
        const int64_t place = (k / kStep<T>) * kPanelColumns * kStep<T> + c * kStep<T> + k % kStep<T>;
        panel[place] = k < known_end ? weight[column * args.weight_stride + k] : T{};
      }
    }
  }
}

}  // namespace

void pack_weight(const PackArgs& args) {
  parallel_for(ceil_div(args.num_columns, kPanelColumns), [&](int64_t panel) {
    if (args.dtype == DType::kFloat32) {
      pack_panel<float>(args, panel);
    } else {
      pack_panel<bf16>(args, panel);
    }
  });
}

void linear(const LinearArgs& args) {
  if (args.num_rows == 0 || args.num_columns == 0) return;
  const int64_t num_panels = ceil_div(args.num_columns, kPanelColumns);
  int64_t task_rows = kTaskRows;
  while (task_rows > 30 && num_panels * ceil_div(args.num_rows, task_rows) < 2 * num_threads()) task_rows /= 2;
  const int64_t row_blocks = ceil_div(args.num_rows, task_rows);
  const bool parallel = args.num_rows * args.num_columns * args.depth > kSmallWork;
  parallel_for_if(parallel, row_blocks * num_panels, [&](int64_t task) {
    const int64_t block = task / num_panels;
    const int64_t row_begin = args.num_rows * block / row_blocks;
    const int64_t row_end = args.num_rows * (block + 1) / row_blocks;
    if (args.dtype == DType::kFloat32) {
      linear_task<float>(args, task % num_panels, row_begin, row_end);
    } else {
      linear_task<bf16>(args, task % num_panels, row_begin, row_end);
    }
  });
}

}  // namespace shardline::SHARDLINE_ISA
