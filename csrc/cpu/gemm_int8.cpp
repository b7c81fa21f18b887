// out[M, N] = x[M, K] weight[N, K]^T + bias with bytes for x and weight. Products are summed in int32, where no order
// matters and nothing is lost; then one multiplication by the two scales, one addition, one rounding.
//
// Weights are stored with 128 added, as the unsigned operand of the dot instruction: a sum starts at -128 times that of
// the row's bytes.
#include "gemm_quantized.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kTileRows = kLanes == 16 ? 6 : 4;

// How many vectors of columns a tile of `rows` holds in registers: 32 with AVX-512, else 16.
constexpr int tile_vectors(int rows) {
  if (kLanes == 16) return 4;
  return rows == 1 ? 4 : 2;
}

template <int kRows>
void tile(const QuantizedLinearArgs& args, const uint8_t* panel, int64_t first_row,
          const float* column_scales, float* sums) {
  constexpr int kVectors = tile_vectors(kRows);
  const int64_t num_quads = ceil_div(args.depth, kQuad);
  const int64_t x_stride = ceil_div(args.depth, kGroupDepth) * kGroupDepth;
  const int64_t sums_stride = ceil_div(args.depth, kGroupDepth) + 1;
  const int8_t* x = args.x + first_row * x_stride;
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    I32 sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 start = broadcast_int(-128 * args.row_sums[(first_row + r) * sums_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = start;
    }
    const uint8_t* w = panel + column * kQuad;
    for (int64_t q = 0; q < num_quads; ++q) {
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
      const F32 row_scale = broadcast(args.row_scales[first_row + r]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const F32 scale = row_scale * load(column_scales + column + v * kLanes);
        store(sums + r * kPanelColumns + column + v * kLanes, to_float(sum[r][v]) * scale);
      }
    }
  }
}

void tile_of(int rows, const QuantizedLinearArgs& args, const uint8_t* panel, int64_t row, const float* scales,
             float* sums) {
  switch (rows) {
    case 1: return tile<1>(args, panel, row, scales, sums);
    case 2: return tile<2>(args, panel, row, scales, sums);
    case 3: return tile<3>(args, panel, row, scales, sums);
    case 4: return tile<4>(args, panel, row, scales, sums);
    case 5: return tile<5>(args, panel, row, scales, sums);
    default: return tile<6>(args, panel, row, scales, sums);
  }
}

template <class T>
void pack_panel(const PackQuantizedArgs& args, int64_t panel_index) {
  constexpr int64_t kChunk = 64;  // a chunk of the panel stays in L1 while the columns are read one after another
  const int64_t num_quads = ceil_div(args.depth, kQuad);
  uint8_t* panel = args.panels + panel_index * num_quads * kQuad * kPanelColumns;
  float* scales = args.scales + panel_index * kPanelColumns;
  const int64_t columns = min64(kPanelColumns, args.num_columns - panel_index * kPanelColumns);
  const T* weight = static_cast<const T*>(args.weight) + panel_index * kPanelColumns * args.weight_stride;
  float inverse[kPanelColumns] = {};
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    const float magnitude = c < columns ? largest_magnitude(weight + c * args.weight_stride, args.depth) : 0.0f;
    const ByteScale scale = byte_scale(magnitude);
    scales[c] = scale.scale;
    inverse[c] = scale.inverse;
  }
  for (int64_t begin = 0; begin < num_quads * kQuad; begin += kChunk) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      int8_t bytes[kChunk] = {};
      for (int64_t k = 0; k < kChunk && c < columns && begin + k < args.depth; k += kLanes) {
        const F32 values = load_n(weight + c * args.weight_stride + begin + k, args.depth - begin - k);
        store_bytes(bytes + k, quantized(values, broadcast(inverse[c])));
      }
      for (int64_t k = 0; k < kChunk && begin + k < num_quads * kQuad; ++k) {
        const int64_t place = ((begin + k) / kQuad * kPanelColumns + c) * kQuad + k % kQuad;
        panel[place] = static_cast<uint8_t>(bytes[k] + 128);
      }
    }
  }
}

}  // namespace

void pack_int8(const PackQuantizedArgs& args) {
  parallel_for(ceil_div(args.num_columns, kPanelColumns), [&](int64_t panel) {
    args.dtype == DType::kFloat32 ? pack_panel<float>(args, panel) : pack_panel<bf16>(args, panel);
  });
}

void linear_int8(const QuantizedLinearArgs& args) {
  const int64_t panel_bytes = ceil_div(args.depth, kQuad) * kQuad * kPanelColumns;
  for_each_tile(args, kTileRows, [&](int64_t panel, int64_t row, int rows, float* sums) {
    tile_of(rows, args, args.panels + panel * panel_bytes, row, args.column_scales + panel * kPanelColumns, sums);
  });
}

}  // namespace shardline::SHARDLINE_ISA
