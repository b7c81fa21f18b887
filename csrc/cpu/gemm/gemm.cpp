// out[M, N] = x[M, K] weight[N, K]^T + bias. Every output is one chain of multiply-adds over k = 0..K-1 in that order,
// in fp32, and then one rounding. Tiling over rows, columns and blocks of K decides when a product is added, never in
// which order. With AMX, bf16 is added in another order, see gemm_amx.h.
#include "gemm/gemm_amx.h"
#include "gemm/gemm_chain.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// Rows of a tile. Sums and operands must fit the registers; bf16 without a dot instruction needs more operands.
template <class T>
constexpr int kTileRows = sizeof(T) == 4 || kHasBf16Dot ? 6
                          : kLanes == 16                ? 5
                                                        : 4;

// The numbers of rows whose tile is wide, see gemm_tiles.h.
constexpr int kWideMin = 7, kWideMax = kLanes == 16 ? 10 : 0;

// How many vectors of columns a tile of `rows` holds in registers. AVX-512 has 32 registers, other ISAs have 16.
constexpr int tile_vectors(int rows, bool wide) {
  if (kLanes == 16) return wide ? kWideVectors : 4;
  return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
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

#if defined(__AMX_BF16__)

void linear_in_tiles(const LinearArgs& args) {
  const PanelLayout layout = {ceil_div(args.depth, kStep<bf16>), kPanelRowBytes};
  const auto add = [&](const Tile& tile) {
    const bf16* x = static_cast<const bf16*>(args.x) + tile.row * args.x_stride;
    add_amx_tile<Bf16Products>({reinterpret_cast<const char*>(x), args.x_stride * 2}, args.depth * 2, tile,
                               tile.begin == 0);
  };
  for_each_tile<AmxTiles<>>(args, layout, add, finish_of<FloatSums<LinearArgs>>(args));
}

#endif

template <class T>
void linear_of(const LinearArgs& args) {
  const PanelLayout layout = {ceil_div(args.depth, kStep<T>), kStep<T> * kPanelColumns * int64_t{sizeof(T)}};
  const auto add = [&](const Tile& tile, auto rows, auto wide) { add_tile<T, rows.kValue, wide.kValue>(args, tile); };
  for_each_tile<ConstantTiles<kTileRows<T>, kWideMin, kWideMax>>(args, layout, add,
                                                                 finish_of<FloatSums<LinearArgs>>(args));
}

}  // namespace

void linear(const LinearArgs& args) {
  if (args.dtype == DType::kFloat32) return linear_of<float>(args);
#if defined(__AMX_BF16__)
  linear_in_tiles(args);
#else
  linear_of<bf16>(args);
#endif
}

}  // namespace shardline::SHARDLINE_ISA
