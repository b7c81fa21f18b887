// out[M, N] = x[M, K] weight[N, K]^T + bias with bytes for x and weight.
#include "gemm/gemm_int8_tile.h"
#include "rowwise/rotate_row.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// `rows`: those of the weight from `first_row` on.
template <class T>
void pack_panel(const PackQuantizedArgs& args, int64_t panel_index, const T* rows, int64_t first_row, int64_t stride) {
  constexpr int64_t kChunk = 64;  // a chunk of the panel stays in L1 while one column after another is read
  const int64_t num_quads = ceil_div(args.depth, kQuad);
  uint8_t* panel = args.panels + panel_index * num_quads * kQuad * kPanelColumns;
  panel += args.place.begin * kQuad;
  float* scales = args.scales + panel_index * kPanelColumns + args.place.begin;
  // Columns [taken, columns) of the panel belong to this weight. Those before belong to another one, those behind
  // become zero.
  const int64_t first_column = panel_index * args.place.width - args.place.first;
  const int64_t taken = max64(0, -first_column), columns = args.num_columns - first_column;
  const auto row_of = [&](int64_t c) { return rows + (first_column + c - first_row) * stride; };
  float inverse[kPanelColumns] = {};
  for (int64_t c = taken; c < args.place.width; ++c) {
    const float magnitude = c < columns ? largest_magnitude(row_of(c), args.depth) : 0.0f;
    const ByteScale scale = byte_scale(magnitude);
    scales[c] = scale.scale;
    inverse[c] = scale.inverse;
  }
  for (int64_t begin = 0; begin < num_quads * kQuad; begin += kChunk) {
    for (int64_t c = taken; c < args.place.width; ++c) {
      int8_t bytes[kChunk] = {};
      for (int64_t k = 0; k < kChunk && c < columns && begin + k < args.depth; k += kLanes) {
        const F32 values = load_n(row_of(c) + begin + k, args.depth - begin - k);
        store_bytes(bytes + k, quantized(values, broadcast(inverse[c])));
      }
      for (int64_t k = 0; k < kChunk && begin + k < num_quads * kQuad; k += kQuad) {
        uint32_t quad;
        __builtin_memcpy(&quad, bytes + k, sizeof quad);
        quad ^= 0x80808080;  // adds 128 to each byte
        __builtin_memcpy(panel + ((begin + k) / kQuad * kPanelColumns + c) * kQuad, &quad, sizeof quad);
      }
    }
  }
}

// Packs a panel of mixed rows, which are the weight of a product with mixed rows.
template <class T>
void pack_rotated_panel(const PackQuantizedArgs& args, int64_t panel_index) {
  const int64_t panel_begin = panel_index * args.place.width - args.place.first;
  const int64_t begin = max64(0, panel_begin), end = min64(args.num_columns, panel_begin + args.place.width);
  float* mixed = static_cast<float*>(thread_scratch(static_cast<size_t>((end - begin) * args.depth) * sizeof(float)));
  for (int64_t column = begin; column < end; ++column) {
    const T* weight = static_cast<const T*>(args.weight) + column * args.weight_stride;
    rotate_row(weight, args.depth, true, mixed + (column - begin) * args.depth);
  }
  pack_panel<float>(args, panel_index, mixed, begin, args.depth);
}

template <class T>
void pack_any_panel(const PackQuantizedArgs& args, int64_t panel_index) {
  if (args.rotated) return pack_rotated_panel<T>(args, panel_index);
  pack_panel<T>(args, panel_index, static_cast<const T*>(args.weight), 0, args.weight_stride);
}

}  // namespace

void pack_int8(const PackQuantizedArgs& args) {
  const int64_t first = args.place.first_panel();
  parallel_for(args.place.end_panel(args.num_columns) - first, [&](int64_t task) {
    args.dtype == DType::kFloat32 ? pack_any_panel<float>(args, first + task)
                                  : pack_any_panel<bf16>(args, first + task);
  });
}

void linear_int8(const QuantizedLinearArgs& args) {
  const PanelLayout layout = {ceil_div(args.depth, kQuad), kQuad * kPanelColumns};
#if defined(__AMX_INT8__)
  if (args.num_rows >= kAmxInt8Rows) {
    return for_each_tile<AmxTiles<>>(
        args, layout, [&](const Tile& tile) { add_int8_amx_tile(args, tile); }, finish_of<Int8Sums>(args));
  }
#endif
  const auto add = [&](const Tile& tile, auto rows, auto wide) { add_int8_tile<rows.kValue, wide.kValue>(args, tile); };
  for_each_tile<ConstantTiles<kInt8TileRows, kInt8WideMin, kInt8WideMax>>(args, layout, add, finish_of<Int8Sums>(args));
}

}  // namespace shardline::SHARDLINE_ISA
