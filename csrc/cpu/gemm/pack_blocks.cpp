// Packs blocks of GGUF into panels of codes, and their scales and mins beside them; see gemm_args.h. A thread unpacks
// some columns of K of a panel's rows and packs them at once, so the codes in between stay in its cache.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

// How many columns of K are unpacked at once. The codes of a panel's rows then fit L2, and a row's blocks are read in
// one piece. A cache line more between rows keeps them from evicting each other.
constexpr int64_t kChunk = 2048, kCodesStride = kChunk + 64;
constexpr int64_t kLeastGroup = 16;

struct Scratch {
  uint8_t codes[kPanelColumns * kCodesStride];
  uint8_t scales[kPanelColumns * kChunk / kLeastGroup], mins[kPanelColumns * kChunk / kLeastGroup];
};

// The blocks [first, first + count) of the rows that are the columns [column, column + num_columns) of a panel.
struct PanelBlocks {
  const uint8_t* blocks;
  int64_t row_stride, block_bytes;
  int64_t first, count;
  int64_t column, num_columns;

  const uint8_t* at(int64_t b, int64_t c) const { return blocks + c * row_stride + b * block_bytes; }
  uint16_t half_at(int64_t b, int64_t c, int64_t byte) const {
    uint16_t half;
    std::memcpy(&half, at(b, c) + byte, sizeof half);
    return half;
  }
};

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

float finite_float(uint16_t half) {
  const uint32_t bits = (half & 0x7fffu) << 13;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  magnitude *= 0x1p112f;
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

// 2^(exponent - 128): the table of e2m1 holds doubled values. The two smallest are no normal numbers.
float power_of_two(uint8_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Calls put(number of the block's group in the panel, column, half) for the halves at `byte` of all blocks; returns
// whether they are finite.
template <class Put>
bool for_each_half(const PanelBlocks& rows, int64_t byte, const Put& put) {
  bool finite = true;
  for (int64_t b = 0; b < rows.count; ++b) {
    for (int64_t c = 0; c < rows.num_columns; ++c) {
      const uint16_t half = rows.half_at(b, c, byte);
      finite = finite && is_finite(half);
      put(rows.first + b, rows.column + c, half);
    }
  }
  return finite;
}

// Writes two levels of scales or mins; `inner` are the small ones, [columns][blocks][num_inner].
bool write_levels(const PanelBlocks& rows, int64_t byte, const uint8_t* inner, int64_t num_inner, uint8_t* panel) {
  const int64_t outer_bytes = (2 + num_inner) * kPanelColumns;
  for (int64_t b = 0; b < rows.count; ++b) {
    uint8_t* to = panel + (rows.first + b) * outer_bytes + 2 * kPanelColumns + rows.column;
    for (int64_t i = 0; i < num_inner; ++i, to += kPanelColumns) {
      for (int64_t c = 0; c < rows.num_columns; ++c) to[c] = inner[(c * rows.count + b) * num_inner + i];
    }
  }
  return for_each_half(rows, byte, [&](int64_t b, int64_t c, uint16_t half) {
    std::memcpy(panel + b * outer_bytes + c * 2, &half, sizeof half);
  });
}

bool write_scales(const PanelBlocks& rows, const BlockShape& shape, uint8_t* panel) {
  if (shape.scale_at >= 0) {
    return for_each_half(rows, shape.scale_at, [&](int64_t b, int64_t c, uint16_t half) {
      std::memcpy(panel + (b * kPanelColumns + c) * 2, &half, sizeof half);
    });
  }
  for (int64_t b = 0; b < rows.count; ++b) {
    for (int64_t c = 0; c < rows.num_columns; ++c) {
      const float scale = power_of_two(*rows.at(b, c));
      std::memcpy(panel + ((rows.first + b) * kPanelColumns + rows.column + c) * 4, &scale, sizeof scale);
    }
  }
  return true;
}

// A block's min is added, and those of groups are subtracted.
bool write_mins(const PanelBlocks& rows, int64_t byte, uint8_t* panel) {
  return for_each_half(rows, byte, [&](int64_t b, int64_t c, uint16_t half) {
    const float min = -finite_float(half);
    std::memcpy(panel + (b * kPanelColumns + c) * 4, &min, sizeof min);
  });
}

bool write_numbers(const PackBlocksArgs& args, const BlockShape& shape, const PanelBlocks& rows, int64_t panel,
                   const Scratch& scratch) {
  const int64_t inner = shape.num_scales;
  const auto of_panel = [&](uint8_t* numbers, int64_t number_bytes) {
    return numbers + panel * args.row_blocks * kPanelColumns * (inner != 0 ? 2 + inner : number_bytes);
  };
  uint8_t* scales = of_panel(args.scales, shape.scale_at < 0 ? 4 : 2);
  const bool finite = inner != 0 ? write_levels(rows, shape.scale_at, scratch.scales, inner, scales)
                                 : write_scales(rows, shape, scales);
  if (shape.min_at < 0) return finite;
  uint8_t* mins = of_panel(args.mins, 4);
  return (inner != 0 ? write_levels(rows, shape.min_at, scratch.mins, inner, mins)
                     : write_mins(rows, shape.min_at, mins)) &&
         finite;
}

bool pack_panel(const PackBlocksArgs& args, int64_t panel) {
  const BlockShape shape = block_shape(args.kind);
  const PanelColumns& place = args.place;
  const int64_t octets = args.row_blocks * shape.elements / kOctet, first_column = panel * place.width - place.first;
  // Columns before `begin` belong to another weight.
  const int64_t begin = std::max<int64_t>(0, -first_column);
  const int64_t count = std::min(place.width, args.num_columns - first_column) - begin;
  auto& scratch = *static_cast<Scratch*>(thread_scratch(sizeof(Scratch)));
  bool finite = true;
  for (int64_t first = 0, blocks; first < args.row_blocks; first += blocks) {
    blocks = std::min(kChunk / shape.elements, args.row_blocks - first);
    const uint8_t* from = args.blocks + (first_column + begin) * args.row_stride + first * shape.bytes;
    kernels().unpack_blocks(
        {args.kind, from, args.row_stride, count, blocks, scratch.codes, kCodesStride, scratch.scales, scratch.mins});
    uint8_t* to = args.panels + (panel * octets + first * shape.elements / kOctet) * octet_bytes(shape.bits);
    pack_codes_panel({scratch.codes,
                      kCodesStride,
                      to,
                      shape.bits,
                      count,
                      blocks * shape.elements,
                      {begin, place.begin, place.width}},
                     0);
    const PanelBlocks rows = {from, args.row_stride, shape.bytes, first, blocks, place.begin + begin, count};
    finite = write_numbers(args, shape, rows, panel, scratch) && finite;
  }
  return finite;
}

}  // namespace

bool pack_blocks(const PackBlocksArgs& args) {
  const int64_t first = args.place.first_panel();
  std::atomic<bool> finite{true};
  parallel_for(args.place.end_panel(args.num_columns) - first, [&](int64_t task) {
    if (!pack_panel(args, first + task)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace shardline
