// out[M, N] = x[M, K] weight[N, K]^T + bias. Every output is one chain of multiply-adds over k = 0..K-1 in that order,
// in fp32, and then one rounding. Tiling over rows, columns and blocks of K decides when a product is added, never in
// which order.
#include "gemm/gemm_tiles.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// Rows of a tile. Sums and operands must fit the registers; bf16 without a dot instruction needs more operands.
template <class T>
constexpr int kTileRows = sizeof(T) == 4 || kHasBf16Dot ? 6 : kLanes == 16 ? 5 : 4;

template <class T>
constexpr int64_t kStep = sizeof(T) == 2 ? 2 : 1;  // bf16 advances by pairs of k

// The numbers of rows whose tile is wide, see gemm_tiles.h.
constexpr int kWideMin = 7, kWideMax = kLanes == 16 ? 10 : 0;

// How many vectors of columns a tile of `rows` holds in registers. AVX-512 has 32 registers, other ISAs have 16.
constexpr int tile_vectors(int rows, bool wide) {
  if (kLanes == 16) return wide ? kWideVectors : 4;
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

template <bool kAsk, int kRows, int kVectors>
inline void accumulate(const float* x, int64_t x_stride, const float* w, int64_t begin, int64_t end, int64_t,
                       Ahead& ahead, F32 (&sum)[kRows][kVectors]) {
  for (int64_t k = begin; k < end; ++k) {
    if (kAsk) ahead.request();
    F32 column[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) column[v] = load(w + (k - begin) * kPanelColumns + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F32 row = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(row, column[v], sum[r][v]);
    }
  }
}

template <bool kAsk, int kRows, int kVectors>
inline void accumulate(const bf16* x, int64_t x_stride, const bf16* w, int64_t begin, int64_t end, int64_t depth,
                       Ahead& ahead, F32 (&sum)[kRows][kVectors]) {
  const int64_t whole_end = min64(end, depth / 2);
  for (int64_t pair = begin; pair < whole_end; ++pair) {
    if (kAsk) ahead.request();
    I32 column[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) column[v] = load_pairs(w + ((pair - begin) * kPanelColumns + v * kLanes) * 2);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const I32 row = broadcast_pair(x + r * x_stride + pair * 2);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = dot_pairs(sum[r][v], row, column[v]);
    }
  }
  if (whole_end < end) {  // an odd K ends with half a pair; the panel has a zero there
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const I32 row = broadcast_pair(x + r * x_stride + whole_end * 2, false);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = dot_pairs(sum[r][v], row, load_pairs(w + ((whole_end - begin) * kPanelColumns + v * kLanes) * 2));
      }
    }
  }
}

template <class T, int kRows, bool kWide>
void add_tile(const LinearArgs& args, const Tile& tile) {
  constexpr int kVectors = tile_vectors(kRows, kWide);
  const T* x = static_cast<const T*>(args.x) + tile.row * args.x_stride;
  const T* steps = reinterpret_cast<const T*>(tile.steps);
  Ahead ahead(tile, kPanelColumns / (kVectors * kLanes));
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    float* sums = static_cast<float*>(tile.sums) + column;
    F32 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = tile.begin == 0 ? F32{} : load(sums + r * kPanelColumns + v * kLanes);
      }
    }
    accumulate<asks_ahead(kRows, kWide)>(x, args.x_stride, steps + column * kStep<T>, tile.begin, tile.end, args.depth,
                                         ahead, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * kLanes, sum[r][v]);
    }
  }
}

// Sums that need no conversion, for gemm_finish.h.
class FloatSums {
 public:
  FloatSums(const LinearArgs&, const FinishedTile& tile) : sums_(static_cast<const float*>(tile.sums)) {}

  inline auto at(int64_t c) const {
    return [sums = sums_ + c](int64_t r) { return load(sums + r * kPanelColumns); };
  }

 private:
  const float* const sums_;
};

template <class T>
void linear_of(const LinearArgs& args) {
  const PanelLayout layout = {ceil_div(args.depth, kStep<T>), kStep<T> * kPanelColumns * int64_t{sizeof(T)}};
  const auto add = [&](const Tile& tile, auto rows, auto wide) { add_tile<T, rows.kValue, wide.kValue>(args, tile); };
  for_each_tile<kTileRows<T>, kWideMin, kWideMax>(args, layout, add, finish_of<FloatSums>(args));
}

}  // namespace

void linear(const LinearArgs& args) { args.dtype == DType::kFloat32 ? linear_of<float>(args) : linear_of<bf16>(args); }

}  // namespace shardline::SHARDLINE_ISA
