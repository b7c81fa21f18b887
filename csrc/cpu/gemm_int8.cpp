// out[M, N] = x[M, K] weight[N, K]^T + bias with bytes for x and weight. Products are summed in int32, where no order
// matters and nothing is lost; then one multiplication by the two scales, one addition, one rounding.
//
// Weights are stored with 128 added, as the unsigned operand of the dot instruction: a sum starts at -128 times that of
// the row's bytes.
#include "gemm_tiles.h"
#include "vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kTileRows = kLanes == 16 ? 6 : 4;

// Rows whose tile is wide, see gemm_tiles.h.
constexpr int kWideMin = 7, kWideMax = kLanes == 16 ? 8 : 0;

// How many vectors of columns a tile of `rows` holds in registers: 32 with AVX-512, else 16.
constexpr int tile_vectors(int rows, bool wide) {
  if (kLanes == 16) return wide ? kWideVectors : 4;
  return rows == 1 ? 4 : 2;
}

template <int kRows, bool kWide>
void add_tile(const QuantizedLinearArgs& args, const Tile& tile) {
  constexpr int kVectors = tile_vectors(kRows, kWide);
  const int64_t x_stride = ceil_div(args.depth, kGroupDepth) * kGroupDepth;
  const int64_t row_sums_stride = ceil_div(args.depth, kGroupDepth) + 1;
  const int8_t* x = args.x + tile.row * x_stride;
  const int64_t begin = tile.begin, end = tile.end;
  Ahead ahead(tile, kPanelColumns / (kVectors * kLanes));
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    int32_t* sums = static_cast<int32_t*>(tile.sums) + column;
    I32 sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 start = broadcast_int(-128 * args.row_sums[(tile.row + r) * row_sums_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = begin == 0 ? start : load(sums + r * kPanelColumns + v * kLanes);
      }
    }
    const char* w = tile.panel + column * kQuad;
    for (int64_t q = begin; q < end; ++q) {
      if (asks_ahead(kRows, kWide)) ahead.request();
      I32 quads[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) quads[v] = load_quads(w + (q * kPanelColumns + v * kLanes) * kQuad);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const I32 row = broadcast_quad(x + r * x_stride + q * kQuad);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = dot_quads(sum[r][v], quads[v], row);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * kLanes, sum[r][v]);
    }
  }
}

template <class T>
void pack_panel(const PackQuantizedArgs& args, int64_t panel_index) {
  constexpr int64_t kChunk = 64;  // a chunk of the panel stays in L1 while the columns are read one after another
  const int64_t num_quads = ceil_div(args.depth, kQuad);
  uint8_t* panel = args.panels + panel_index * num_quads * kQuad * kPanelColumns;
  panel += args.place.begin * kQuad;
  float* scales = args.scales + panel_index * kPanelColumns + args.place.begin;
  // Columns [taken, columns) of this panel's are the weight's; those before are another's, those behind become zero.
  const int64_t first_column = panel_index * args.place.width - args.place.first;
  const int64_t taken = max64(0, -first_column), columns = args.num_columns - first_column;
  const T* weight = static_cast<const T*>(args.weight) + first_column * args.weight_stride;
  float inverse[kPanelColumns] = {};
  for (int64_t c = taken; c < args.place.width; ++c) {
    const float magnitude = c < columns ? largest_magnitude(weight + c * args.weight_stride, args.depth) : 0.0f;
    const ByteScale scale = byte_scale(magnitude);
    scales[c] = scale.scale;
    inverse[c] = scale.inverse;
  }
  for (int64_t begin = 0; begin < num_quads * kQuad; begin += kChunk) {
    for (int64_t c = taken; c < args.place.width; ++c) {
      int8_t bytes[kChunk] = {};
      for (int64_t k = 0; k < kChunk && c < columns && begin + k < args.depth; k += kLanes) {
        const F32 values = load_n(weight + c * args.weight_stride + begin + k, args.depth - begin - k);
        store_bytes(bytes + k, quantized(values, broadcast(inverse[c])));
      }
      for (int64_t k = 0; k < kChunk && begin + k < num_quads * kQuad; k += kQuad) {
        uint32_t quad;
        __builtin_memcpy(&quad, bytes + k, sizeof quad);
        quad ^= 0x80808080;  // 128 more in each byte
        __builtin_memcpy(panel + ((begin + k) / kQuad * kPanelColumns + c) * kQuad, &quad, sizeof quad);
      }
    }
  }
}

}  // namespace

void pack_int8(const PackQuantizedArgs& args) {
  const int64_t first = args.place.first_panel();
  parallel_for(args.place.end_panel(args.num_columns) - first, [&](int64_t task) {
    args.dtype == DType::kFloat32 ? pack_panel<float>(args, first + task) : pack_panel<bf16>(args, first + task);
  });
}

void linear_int8(const QuantizedLinearArgs& args) {
  const PanelLayout layout = {ceil_div(args.depth, kQuad), kQuad * kPanelColumns};
  const auto add = [&](const Tile& tile, auto rows, auto wide) { add_tile<rows.kValue, wide.kValue>(args, tile); };
  const auto finish = [&](const FinishedTile& tile) {
    const int32_t* sums = static_cast<const int32_t*>(tile.sums);
    const float *row_scales = args.row_scales + tile.row, *scales = args.column_scales + tile.panel * kPanelColumns;
    finish_tile(args, tile, false, [sums, row_scales, scales](int64_t r, int64_t c) {
      return to_float(load(sums + r * kPanelColumns + c)) * (broadcast(row_scales[r]) * load(scales + c));
    });
  };
  for_each_tile<kTileRows, kWideMin, kWideMax>(args, layout, add, finish);
}

}  // namespace shardline::SHARDLINE_ISA
