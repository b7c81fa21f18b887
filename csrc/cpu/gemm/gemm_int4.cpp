// out[M, N] = x[M, K] weight[N, K]^T + bias with bytes for x and 4-bit weights. 32 neighbours along K share a whole
// number as their scale. So value x scale is a byte, and the sum over all of K is exact in int32, in any order. Then
// come one multiplication by the scales of row and column, one addition, and one rounding, as in int8. (Scales of two
// levels are from QServe, arXiv 2405.04532.) A few rows multiply the values group by group; many rows multiply bytes
// that are unpacked once.
//
// A value q in [-8, 7] is stored as q + 8. A group of a panel is four times 64 columns x 4 bytes: the low halves hold
// quad 2i of k, the high halves quad 2i + 1. The scales of the columns follow, bytes from -15 to 15.
#include "gemm/gemm_int8_tile.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kTileRows = kLanes == 16 ? 6 : 3;
constexpr int64_t kValueBytes = kGroupDepth * kPanelColumns / 2, kQuadsOfGroup = kGroupDepth / kQuad;
constexpr float kMaxScale = 15.0f;

// From this many rows on a panel is unpacked: unpacking costs as much as about 50 rows save, or few with AMX. Without
// the dot instruction, bytes of at most 15 are multiplied faster than others.
#if defined(__AMX_INT8__)
constexpr int64_t kUnpackRows = 16;
#else
constexpr int64_t kUnpackRows = kHasByteDot ? 56 : int64_t{1} << 62;
#endif

// Without the dot instruction gcc 12 reorders the sums of unrolled steps until they no longer fit the registers.
constexpr int kPairUnroll = kHasByteDot ? 4 : 1;

// The numbers of rows whose tile is wide, see gemm_tiles.h.
constexpr int kWideMin = 4, kWideMax = kLanes == 16 ? 6 : 0;

// How many vectors of columns a tile of `rows` holds in registers. It holds them twice: the sums of a group and of all
// groups.
constexpr int tile_vectors(int rows) {
  if (kLanes == 16) return rows <= 3 ? 4 : kWideVectors;
  return rows == 1 ? 4 : 2;
}

template <bool kAsk, int kRows, int kVectors>
inline void add_group(const int8_t* x, int64_t x_stride, const uint8_t* w, Ahead& ahead, I32 (&sum)[kRows][kVectors]) {
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
  const uint8_t* steps = reinterpret_cast<const uint8_t*>(tile.steps);
  Ahead ahead(tile, 4 * kPanelColumns / (kVectors * kLanes));
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    int32_t* sums = static_cast<int32_t*>(tile.sums) + column;
    I32 total[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] = tile.begin == 0 ? I32{} : load(sums + r * kPanelColumns + v * kLanes);
      }
    }
    for (int64_t g = tile.begin; g < tile.end; ++g) {
      const uint8_t* group = steps + (g - tile.begin) * kInt4GroupBytes;
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
        const I32 scale = load_bytes(reinterpret_cast<const int8_t*>(group + kValueBytes) + column + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          total[r][v] = add_scaled(total[r][v], end_small(sum[r][v], start(r)), scale);
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

// Values x scales as the GEMM over bytes takes them, with 128 added.
void unpack_groups(const char* steps, int64_t count, void* to) {
  const uint8_t* group = reinterpret_cast<const uint8_t*>(steps);
  uint8_t* bytes = static_cast<uint8_t*>(to);
  for (int64_t g = 0; g < count; ++g, group += kInt4GroupBytes, bytes += kGroupDepth * kPanelColumns) {
    for (int64_t column = 0; column < kPanelColumns; column += kLanes) {
      const U32 scale = (U32)load_bytes(reinterpret_cast<const int8_t*>(group + kValueBytes) + column);
      const UHalfLanes factor = (UHalfLanes)((scale & 0xffffu) | scale << 16);
      const ByteLanes offset = (ByteLanes)(((128u - 8u * scale) & 0xffu) * 0x01010101u);
      // Even and odd bytes in turn, since the upper half of a product must not reach the next byte.
      const auto scaled = [&](U32 halves) {
        const U32 even = (U32)((UHalfLanes)(halves & 0x000f000fu) * factor) & 0x00ff00ffu;
        const U32 odd = (U32)((UHalfLanes)(halves & 0x0f000f00u) * factor);
        return (I32)((ByteLanes)(even | odd) + offset);
      };
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const U32 both = (U32)load_quads(group + (pair * kPanelColumns + column) * kQuad);
        int32_t* quads = reinterpret_cast<int32_t*>(bytes) + pair * 2 * kPanelColumns + column;
        store(quads, scaled(both));
        store(quads + kPanelColumns, scaled(both >> 4));
      }
    }
  }
}

// The 32 weights of a column that share a scale, as floats and then as integers.
struct Group {
  F32 values[kGroupDepth / kLanes];
  I32 levels[kGroupDepth / kLanes];
};

template <class T>
inline Group load_group(const T* weight, int64_t known) {
  Group group = {};
  for (int64_t i = 0; i < kGroupDepth / kLanes && i * kLanes < known; ++i) {
    group.values[i] = load_n(weight + i * kLanes, known - i * kLanes);
  }
  return group;
}

// The weight with the largest magnitude.
inline float extreme_of(const Group& group) {
  F32 high = group.values[0], low = -group.values[0];
  for (const F32& values : group.values) {
    high = maximum(high, values);
    low = maximum(low, -values);
  }
  const float highest = max_lanes(high), lowest = max_lanes(low);
  return highest >= lowest ? highest : -lowest;
}

// Levels in [-8, 7] for a step, and their squared error.
float set_levels(Group& group, float step) {
  const F32 inverse = broadcast(1.0f / step);
  F32 error = {};
  for (int i = 0; i < kGroupDepth / kLanes; ++i) {
    group.levels[i] = nearest(minimum(broadcast(7.0f), maximum(broadcast(-8.0f), group.values[i] * inverse)));
    const F32 off = group.values[i] - to_float(group.levels[i]) * step;
    error = error + off * off;
  }
  return sum_lanes(error);
}

// The best of three scales, each of which puts the group's extreme weight near -8, the larger end of the range. The
// best one has the least squared error.
int quantize_group(Group& group, float column_scale) {
  const float extreme = extreme_of(group), half_above = __builtin_fabsf(extreme) / (8.0f * column_scale) + 0.5f;
  const int middle = static_cast<int>(half_above), sign = extreme > 0.0f ? -1 : 1;
  int best = 0;
  float least = __builtin_inff();
  for (const int candidate : {middle, middle - 1, middle + 1}) {
    if (candidate < 1 || candidate > static_cast<int>(kMaxScale)) continue;
    const float error = set_levels(group, static_cast<float>(sign * candidate) * column_scale);
    if (error < least) {
      least = error;
      best = sign * candidate;
    }
  }
  set_levels(group, static_cast<float>(best) * column_scale);
  return best;
}

// Packs one column of a panel and returns its scale; null stands for a column of zeros.
template <class T>
float pack_column(const T* weight, int64_t depth, uint8_t* packed, int64_t c) {
  const float magnitude = weight == nullptr ? 0.0f : largest_magnitude(weight, depth);
  // As in int8: everything computed from a weight that is not finite is NaN, and a weight that is too small counts as
  // zero.
  const bool empty = weight == nullptr || !(magnitude - magnitude == 0.0f) || magnitude < 1e-34f;
  const float column_scale = magnitude / (8.0f * kMaxScale);
  for (int64_t k = 0; k < depth; k += kGroupDepth, packed += kInt4GroupBytes) {
    Group group = empty ? Group{} : load_group(weight + k, depth - k);
    const int scale = empty || extreme_of(group) == 0.0f ? 1 : quantize_group(group, column_scale);
    packed[kValueBytes + c] = static_cast<uint8_t>(scale);
    int8_t levels[kGroupDepth];
    for (int i = 0; i < kGroupDepth / kLanes; ++i) store_bytes(levels + i * kLanes, group.levels[i] + 8);
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t low, high;
      __builtin_memcpy(&low, levels + pair * 2 * kQuad, sizeof low);
      __builtin_memcpy(&high, levels + pair * 2 * kQuad + kQuad, sizeof high);
      const uint32_t both = low | high << 4;
      __builtin_memcpy(packed + (pair * kPanelColumns + c) * kQuad, &both, sizeof both);
    }
  }
  return magnitude < 1e-34f ? 0.0f : empty ? __builtin_nanf("") : column_scale;
}

template <class T>
void pack_panel(const PackQuantizedArgs& args, int64_t panel_index) {
  uint8_t* panel = args.panels + panel_index * ceil_div(args.depth, kGroupDepth) * kInt4GroupBytes;
  float* scales = args.scales + panel_index * kPanelColumns;
  // The panel's columns before this weight's belong to another one, those behind become zero.
  const int64_t first_column = panel_index * args.place.width - args.place.first;
  for (int64_t c = max64(0, -first_column); c < args.place.width; ++c) {
    const int64_t column = first_column + c, place = args.place.begin + c;
    const T* weight = static_cast<const T*>(args.weight) + column * args.weight_stride;
    scales[place] = pack_column(column < args.num_columns ? weight : nullptr, args.depth, panel, place);
  }
}

}  // namespace

void pack_int4(const PackQuantizedArgs& args) {
  const int64_t first = args.place.first_panel();
  parallel_for(args.place.end_panel(args.num_columns) - first, [&](int64_t task) {
    args.dtype == DType::kFloat32 ? pack_panel<float>(args, first + task) : pack_panel<bf16>(args, first + task);
  });
}

void linear_int4(const QuantizedLinearArgs& args) {
  PanelLayout layout = {ceil_div(args.depth, kGroupDepth), kInt4GroupBytes};
  const Finish<QuantizedLinearArgs> finish = finish_of<Int8Sums>(args);
  if (args.num_rows < kUnpackRows) {
    const auto add = [&](const Tile& tile, auto rows, auto wide) { add_tile<rows.kValue, wide.kValue>(args, tile); };
    return for_each_tile<ConstantTiles<kTileRows, kWideMin, kWideMax>>(args, layout, add, finish);
  }
  layout.unpacked_bytes = kGroupDepth * kPanelColumns;
  const auto as_bytes = [](const Tile& tile) {
    Tile bytes = tile;
    bytes.begin *= kQuadsOfGroup;
    bytes.end *= kQuadsOfGroup;
    bytes.ahead_stride = ceil_div(tile.ahead_stride, kQuadsOfGroup);
    return bytes;
  };
#if defined(__AMX_INT8__)
  const auto add = [&](const Tile& tile) { add_int8_amx_tile(args, as_bytes(tile)); };
  for_each_tile<AmxTiles<kAmxRows / kQuadsOfGroup>>(args, layout, add, finish, unpack_groups);
#else
  const auto add = [&](const Tile& tile, auto rows, auto wide) {
    add_int8_tile<rows.kValue, wide.kValue>(args, as_bytes(tile));
  };
  for_each_tile<ConstantTiles<kInt8TileRows, kInt8WideMin, kInt8WideMax>>(args, layout, add, finish, unpack_groups);
#endif
}

}  // namespace shardline::SHARDLINE_ISA
