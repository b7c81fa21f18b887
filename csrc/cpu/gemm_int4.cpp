// out[M, N] = x[M, K] weight[N, K]^T + bias with bytes for x and 4-bit weights that share a scale in groups of 32 along
// K. A group's products are summed in int32; the groups are scaled and added in fp32 in the order of K, whatever the
// tiling; then one multiplication by the row's scale, one addition, one rounding.
//
// A weight q in [-8, 7] is stored as q + 8, so a group's sum has -8 times that of the row's bytes added. A group of a
// panel is 64 columns x 4 bytes, four times: quad 2i of k in the low halves, quad 2i + 1 in the high ones; then the
// columns' scales in bf16.
#include "gemm_tiles.h"
#include "vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kTileRows = kLanes == 16 ? 6 : 3;
constexpr int64_t kValueBytes = kGroupDepth * kPanelColumns / 2;

// Without the dot instruction gcc 12 reorders the sums of unrolled steps until they no longer fit the registers.
constexpr int kPairUnroll = kHasByteDot ? 4 : 1;

// Rows whose tile is wide, see gemm_tiles.h.
constexpr int kWideMin = 4, kWideMax = kLanes == 16 ? 6 : 0;

// How many vectors of columns a tile of `rows` holds in registers, twice: as integers and as floats.
constexpr int tile_vectors(int rows) {
  if (kLanes == 16) return rows <= 3 ? 4 : kWideVectors;
  return rows == 1 ? 4 : 2;
}

template <bool kAsk, int kRows, int kVectors>
inline void add_group(const int8_t* x, int64_t x_stride, const uint8_t* w, Ahead& ahead,
                      I32 (&sum)[kRows][kVectors]) {
#pragma GCC unroll kPairUnroll
  for (int pair = 0; pair < 4; ++pair) {
    if (kAsk) ahead.request();
    I32 low[kVectors], high[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const U32 both = (U32)load_quads(w + (pair * kPanelColumns + v * kLanes) * kQuad);
      low[v] = (I32)(both & 0x0f0f0f0fu);
      high[v] = (I32)(both >> 4 & 0x0f0f0f0fu);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 first = broadcast_quad(x + r * x_stride + pair * 2 * kQuad);
      const I32 second = broadcast_quad(x + r * x_stride + pair * 2 * kQuad + kQuad);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = add_small_quads(sum[r][v], low[v], first);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = add_small_quads(sum[r][v], high[v], second);
    }
  }
}

template <int kRows, bool kWide>
void add_tile(const QuantizedLinearArgs& args, const Tile& tile) {
  constexpr int kVectors = tile_vectors(kRows);
  const int64_t num_groups = ceil_div(args.depth, kGroupDepth);
  const int64_t x_stride = num_groups * kGroupDepth;
  const int8_t* x = args.x + tile.row * x_stride;
  const int32_t* row_sums = args.row_sums + tile.row * (num_groups + 1) + 1;
  const uint8_t* panel = reinterpret_cast<const uint8_t*>(tile.panel);
  Ahead ahead(tile, 4 * kPanelColumns / (kVectors * kLanes));
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    float* sums = static_cast<float*>(tile.sums) + column;
    F32 total[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] = tile.begin == 0 ? F32{} : load(sums + r * kPanelColumns + v * kLanes);
      }
    }
    for (int64_t g = tile.begin; g < tile.end; ++g) {
      const uint8_t* group = panel + g * kInt4GroupBytes;
      const auto start = [&](int r) { return broadcast_int(-8 * row_sums[r * (num_groups + 1) + g]); };
      I32 sum[kRows][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = begin_small(start(r));
      }
      add_group<asks_ahead(kRows, kWide)>(x + g * kGroupDepth, x_stride, group + column * kQuad, ahead, sum);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const F32 scale = load(reinterpret_cast<const bf16*>(group + kValueBytes) + column + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          total[r][v] = fma(to_float(end_small(sum[r][v], start(r))), scale, total[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * kLanes, total[r][v]);
    }
  }
}

// 32 weights of a column that share a scale, as floats and then as integers.
struct Group {
  F32 values[kGroupDepth / kLanes];
  I32 levels[kGroupDepth / kLanes];
};

inline bf16 nearest_bf16(float value) {
  bf16 lanes[kLanes];
  store(lanes, broadcast(value));
  return lanes[0];
}

// Levels in [-8, 7] for a scale, and the squared error.
float set_levels(Group& group, float scale) {
  const F32 inverse = broadcast(scale == 0.0f ? 0.0f : 1.0f / scale);
  F32 error = {};
  for (int i = 0; i < kGroupDepth / kLanes; ++i) {
    F32 scaled = group.values[i] * inverse;
    scaled = scaled < -8.0f ? broadcast(-8.0f) : scaled;
    scaled = scaled > 7.0f ? broadcast(7.0f) : scaled;
    group.levels[i] = nearest(scaled == scaled ? scaled : F32{});
    const F32 off = group.values[i] - to_float(group.levels[i]) * scale;
    error = error + off * off;
  }
  return sum_lanes(error);
}

// The scale that gives the least squared error among three under which the group's extreme weight falls near -8, the
// larger end of the range. Scales are bf16, and levels are chosen for what bf16 keeps of them.
bf16 quantize_group(Group& group) {
  float extreme = 0.0f;
  bool finite = true;
  for (const F32& values : group.values) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = values[lane];
      finite = finite && value - value == 0.0f;
      if (__builtin_fabsf(value) > __builtin_fabsf(extreme)) extreme = value;
    }
  }
  if (!finite) {  // as in int8: what is computed from it is NaN
    set_levels(group, 0.0f);
    return nearest_bf16(__builtin_nanf(""));
  }
  if (__builtin_fabsf(extreme) < 1e-30f) {
    set_levels(group, 0.0f);
    return bf16{0};
  }
  bf16 best = nearest_bf16(extreme / -8.0f);
  float least = set_levels(group, to_float(best));
  for (const float range : {-7.5f, -8.5f}) {
    const bf16 scale = nearest_bf16(extreme / range);
    const float error = set_levels(group, to_float(scale));
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  set_levels(group, to_float(best));
  return best;
}

template <class T>
void pack_panel(const PackQuantizedArgs& args, int64_t panel_index) {
  const int64_t num_groups = ceil_div(args.depth, kGroupDepth);
  uint8_t* panel = args.panels + panel_index * num_groups * kInt4GroupBytes;
  for (int64_t g = 0; g < num_groups; ++g) {
    uint8_t* packed = panel + g * kInt4GroupBytes;
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const int64_t column = panel_index * kPanelColumns + c;
      const T* weight = static_cast<const T*>(args.weight) + column * args.weight_stride;
      Group group = {};
      for (int64_t i = 0; i < kGroupDepth / kLanes; ++i) {
        const int64_t k = g * kGroupDepth + i * kLanes;
        if (column < args.num_columns && k < args.depth) group.values[i] = load_n(weight + k, args.depth - k);
      }
      const bf16 scale = quantize_group(group);
      __builtin_memcpy(packed + kValueBytes + c * sizeof scale, &scale, sizeof scale);
      int8_t levels[kGroupDepth];
      for (int i = 0; i < kGroupDepth / kLanes; ++i) store_bytes(levels + i * kLanes, group.levels[i] + 8);
      for (int pair = 0; pair < 4; ++pair) {
        for (int b = 0; b < kQuad; ++b) {
          const int8_t* both = levels + pair * 2 * kQuad + b;
          packed[(pair * kPanelColumns + c) * kQuad + b] = static_cast<uint8_t>(both[0] | both[kQuad] << 4);
        }
      }
    }
  }
}

}  // namespace

void pack_int4(const PackQuantizedArgs& args) {
  parallel_for(ceil_div(args.num_columns, kPanelColumns), [&](int64_t panel) {
    args.dtype == DType::kFloat32 ? pack_panel<float>(args, panel) : pack_panel<bf16>(args, panel);
  });
}

void linear_int4(const QuantizedLinearArgs& args) {
  const PanelLayout layout = {ceil_div(args.depth, kGroupDepth), kInt4GroupBytes};
  const auto add = [&](const Tile& tile, auto rows, auto wide) { add_tile<rows.kValue, wide.kValue>(args, tile); };
  const auto finish = [&](const FinishedTile& tile) {
    const float *sums = static_cast<const float*>(tile.sums), *row_scales = args.row_scales + tile.row;
    finish_tile(args, tile, false, [sums, row_scales](int64_t r, int64_t c) {
      return load(sums + r * kPanelColumns + c) * broadcast(row_scales[r]);
    });
  };
  for_each_tile<kTileRows, kWideMin, kWideMax>(args, layout, add, finish);
}

}  // namespace shardline::SHARDLINE_ISA
