// Arguments of the matrix products, of the kernels that pack their weights, and of the one that quantizes their inputs.
//
// "Rows" are row-major with contiguous elements in a row; a stride counts elements between rows.
#pragma once

#include "rowwise/rowwise_args.h"
#include "runtime/types.h"

namespace shardline {

constexpr int64_t kPanelColumns = 64;
// A gated GEMM writes act(gate) * up, rounded once. Each panel then has 32 columns of the gate's weight, followed by
// the same 32 columns of up's weight. num_columns counts the columns that are written.
constexpr int64_t kGatedColumns = kPanelColumns / 2;

// Where the columns of a weight go in panels that several weights may share: the weight fills columns
// [begin, begin + width) of each panel, one panel after another, starting at the `first` of these columns. The rest of
// the weight's last panel becomes zero, and the next weight overwrites it: so weights are packed in their order.
struct PanelColumns {
  int64_t first, begin, width;

  int64_t first_panel() const { return first / width; }
  int64_t end_panel(int64_t num_columns) const { return (first + num_columns + width - 1) / width; }
};

// weight [N, K] becomes panels of 64 columns: [panel][k][column], or for bf16 [panel][k / 2][column][k % 2]; padded
// with zeros to whole panels and whole pairs.
struct PackArgs {
  DType dtype;
  const void* weight;
  int64_t weight_stride;
  void* panels;
  int64_t num_columns, depth;
  PanelColumns place;
};

struct LinearArgs {
  DType dtype, out_dtype, bias_dtype;
  const void* x;
  int64_t x_stride;
  const void* panels;
  const void* bias;     // null for none; the gate's, then up's
  int64_t bias_stride;  // 0: one bias for all rows; else each row has one of floats, so far from the next
  int64_t factors;      // with biases of rows: how far behind a bias the factor of its sum is; 0: there are none
  void* out;
  int64_t out_stride;
  int64_t num_rows, num_columns, depth;
  bool gated;
  Activation activation;    // of the gate
  bool best;                // out [num_rows][2][num_panels]: the largest output of each panel; its column, as int32
  const uint64_t* allowed;  // of `best`: bits of the columns that may win, [num_rows][num_panels]; null: all
};

// How many bytes of k one column contributes to a step of the quantized GEMMs, and how many weights share a scale in
// int4.
constexpr int64_t kQuad = 4, kGroupDepth = 32;
// A group of a panel in int4: 4-bit values, two in a byte, then one byte per column as its scale.
constexpr int64_t kInt4GroupBytes = kGroupDepth * kPanelColumns / 2 + kPanelColumns;

struct QuantizeRowsArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  int8_t* values;  // [num_rows, depth padded with zeros to whole groups]
  float* scales;   // [num_rows]
  int32_t* sums;   // [num_rows, 1 + number of groups]: the sum of the row's values, then the sum of each group
  int64_t num_rows, depth;
  bool rotated;  // whether rows are mixed first, see rotate_row.h
};

// Rounds each group of columns of x to float8_e4m3fn: out = e4m3(x / scale), in the dtype of x, which holds it exactly.
struct RoundRowsArgs {
  DType dtype;
  const void* x;  // may be `out`
  int64_t x_stride;
  void* out;      // [num_rows, depth]
  float* scales;  // [num_rows, number of groups]; NaN for a group that is not finite
  int64_t num_rows, depth, group_size;
  float fixed_scale;  // 0: the largest |x| of a group becomes 448
  float bound;        // larger |x| count as this number; 0: no bound
};

// weight [N, K] becomes panels of 64 columns, and a scale per column: in int8 [panel][k / 4][column][k % 4] with 128
// added; in int4 [panel][k / 32], each kInt4GroupBytes.
struct PackQuantizedArgs {
  DType dtype;
  const void* weight;
  int64_t weight_stride;
  uint8_t* panels;
  float* scales;  // [N padded to whole panels]
  int64_t num_columns, depth;
  PanelColumns place;
  bool rotated;  // in int8: whether the weight is for rows that are mixed, see rotate_row.h
};

struct QuantizedLinearArgs {
  DType out_dtype, bias_dtype;
  const int8_t* x;  // as in QuantizeRowsArgs
  const float* row_scales;
  const int32_t* row_sums;
  const uint8_t* panels;
  const float* column_scales;
  const void* bias;     // null for none; the gate's, then up's
  int64_t bias_stride;  // 0: one bias for all rows; else each row has one of floats, so far from the next
  int64_t factors;      // with biases of rows: how far behind a bias the factor of its sum is; 0: there are none
  void* out;
  int64_t out_stride;
  int64_t num_rows, num_columns, depth;
  bool gated;
  Activation activation;  // of the gate
  bool best;              // int8 only, see LinearArgs
  const uint64_t* allowed;
};

// A dense weight [N, K] as codes with numbers for each 32 neighbours along K, as quantize_groups.cpp says: the value of
// a code is code * scale - min. With G groups a row, `outer_groups` neighbouring ones share their outer numbers.
constexpr int64_t kMostOuterGroups = 8;
struct QuantizeNibblesArgs {
  DType dtype;
  const void* weight;
  int64_t weight_stride;
  uint8_t* codes;                       // [N, K]
  int8_t *scales, *mins;                // [N, G]
  uint16_t *outer_scales, *outer_mins;  // [N, G / outer_groups], halves
  int64_t num_rows, depth, outer_groups;
};
// The same with the value (code - 128) * scale.
struct QuantizeBytesArgs {
  DType dtype;
  const void* weight;
  int64_t weight_stride;
  uint8_t* codes;  // [N, K]
  bf16* scales;    // [N, G]
  int64_t num_rows, depth;
};

// Weights of codes of 4, 6 or 8 bits, whose columns along K share scales in groups of group_size neighbours, a multiple
// of 8; the last group may be smaller. Codes are packed in panels of 64 columns: [panel][k / 8][kOctetBytes<bits>].
// With 4 bits, an octet of k has 32 bits per column: even k in the lower half, odd k in the upper half, each four codes
// from the lowest bits on. With 8 bits, it has [half of the octet][16 columns][4 columns][pair of k][column][k % 2].
// With 6 bits, two neighbouring columns have twelve bytes, three for each pair of k: [column][k % 2] from the lowest
// bits on. Each 32 columns have three vectors of eight words of 64 bits, a word for two columns. The first vector has
// eight of the twelve bytes of 16 columns, the second has those of the next 16, and the third has the other four of
// both.
constexpr int64_t kOctet = 8;
constexpr int64_t octet_bytes(int64_t bits) { return kOctet * kPanelColumns * bits / 8; }

// Where byte i of the twelve of the columns c and c + 1 lies in an octet of 6-bit codes.
constexpr int64_t six_bit_byte(int64_t c, int64_t i) {
  const int64_t word = c / 32 * 192 + c % 16 / 2 * 8;
  if (c % 32 < 16) return word + (i < 8 ? i : 128 + i - 8);
  return word + (i < 4 ? 128 + 4 + i : 64 + i - 4);
}

// Writes the codes of the columns c and c + 1 into an octet of 6-bit codes. Each argument has the eight codes of a
// column, a byte each.
static inline void write_six_bit_pair(uint64_t first, uint64_t second, int64_t c, uint8_t* octet) {
  // Twelve bits of each pair of k in a word of 16 bits, then 24 bits with those of the next column.
  const uint64_t mask = 0x003f003f003f003f, next = mask << 6;
  first = (first & mask) | (first >> 2 & next);
  second = (second & mask) | (second >> 2 & next);
  const auto pair_at = [&](int shift) { return (first >> shift & 0xfff) | (second >> shift & 0xfff) << 12; };
  const uint64_t third = pair_at(32), low = pair_at(0) | pair_at(16) << 24 | third << 48;
  const uint64_t high = third >> 16 | pair_at(48) << 8, middle = low >> 32 | high << 32;
  uint8_t* word = octet + c / 32 * 192 + c % 16 / 2 * 8;
  if (c % 32 < 16) {
    __builtin_memcpy(word, &low, 8);
    __builtin_memcpy(word + 128, &high, 4);
  } else {
    __builtin_memcpy(word + 128 + 4, &low, 4);
    __builtin_memcpy(word + 64, &middle, 8);
  }
}

// The code of column c and place k of an octet.
static inline int code_at(const uint8_t* octet, int64_t bits, int64_t c, int64_t k) {
  if (bits == 4) return octet[c * 4 + k % 2 * 2 + k / 4] >> (k / 2 % 2 * 4) & 15;
  if (bits == 6) {
    const int64_t first = k / 2 * 3;
    const int three = octet[six_bit_byte(c, first)] | octet[six_bit_byte(c, first + 1)] << 8 |
                      octet[six_bit_byte(c, first + 2)] << 16;
    return three >> (c % 2 * 2 + k % 2) * 6 & 63;
  }
  return octet[k / 4 * 256 + c / 4 * 16 + k / 2 % 2 * 8 + c % 4 * 2 + k % 2];
}

struct PackCodesArgs {
  const uint8_t* codes;  // [N, K]
  int64_t codes_stride;
  uint8_t* panels;
  int64_t bits, num_columns, depth;
  PanelColumns place;
};
void pack_codes(const PackCodesArgs& args);
// The same for one panel, on the calling thread.
void pack_codes_panel(const PackCodesArgs& args, int64_t panel_index);

// Unpacks words of one or four bytes, each with several numbers of 4 or 8 bits that are neighbours in a row or in a
// column of the output. A line is a row of the output, or with `along_rows` a column.
struct UnpackWordsArgs {
  const uint8_t* words;  // num_lines of num_words each, with these strides in bytes
  int64_t word_stride, line_stride;
  int64_t num_words, num_lines;
  int64_t word_bytes, bits;
  int64_t order[8];  // the neighbour in a word's lowest bits, in the next bits, and so on
  uint8_t offset;    // added to each number, which wraps
  bool along_rows;
  uint8_t* codes;  // [rows, columns]
  int64_t codes_stride;
};
void unpack_words(const UnpackWordsArgs& args);

// The packed types of GGUF, by the numbers that its files have for them.
enum class BlockKind : int64_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kMXFP4 = 39
};
// Neighbours in a block, its bytes, its small scales, the bits of a code in memory, and the bytes at which the scale
// and the min of the block begin, in half precision. `elements` 0: an unknown type.
struct BlockShape {
  int64_t elements, bytes, num_scales, bits, scale_at, min_at = -1;
};
static inline BlockShape block_shape(BlockKind kind) {
  switch (kind) {
    case BlockKind::kQ4_0: return {32, 18, 0, 4, 0};
    case BlockKind::kQ4_1: return {32, 20, 0, 4, 0, 2};
    case BlockKind::kQ5_0: return {32, 22, 0, 6, 0};
    case BlockKind::kQ5_1: return {32, 24, 0, 6, 0, 2};
    case BlockKind::kQ8_0: return {32, 34, 0, 8, 0};
    case BlockKind::kMXFP4: return {32, 17, 0, 4, -1};  // byte 0 is an exponent
    case BlockKind::kQ4_K: return {256, 144, 8, 4, 0, 2};
    case BlockKind::kQ5_K: return {256, 176, 8, 6, 0, 2};
    case BlockKind::kQ6_K: return {256, 210, 16, 6, 208};
  }
  return {};
}

struct UnpackBlocksArgs {
  BlockKind kind;
  const uint8_t* blocks;
  int64_t row_stride;  // in bytes
  int64_t num_rows, row_blocks;
  uint8_t* codes;  // [N, K], those of Q8_0 plus 128
  int64_t codes_stride;
  uint8_t* scales;  // [N, groups] small scales, if the type has them
  uint8_t* mins;    // those of Q4_K and Q5_K
};

// Packs the rows of a weight from blocks. Scales and mins are those of GroupNumbers: of two levels if the type has
// small scales. Otherwise scales are halves, or floats for MXFP4, and mins are floats.
struct PackBlocksArgs {
  BlockKind kind;
  const uint8_t* blocks;
  int64_t row_stride;               // in bytes
  int64_t num_columns, row_blocks;  // rows in the file are columns of panels
  uint8_t* panels;
  uint8_t *scales, *mins;
  PanelColumns place;
};
// Returns whether all scales and mins are finite. If they are not, the panels are of no use.
bool pack_blocks(const PackBlocksArgs& args);

// The value of each byte in float8_e4m3fn: a sign, 4 bits of exponent, 3 bits of mantissa; no infinity.
const float* e4m3_table();

// The scales or the mins of groups: [num_panels, num_groups, 64], or in kInt8 two levels. Then 2^outer_shift groups of
// a panel share an outer level: [num_panels, num_groups >> outer_shift], each 64 halves, and a byte for every group and
// column. The product of byte and half is exact in fp32.
struct GroupNumbers {
  const void* data;  // null for none
  DType dtype;
  int64_t outer_shift;

  int64_t outer_bytes() const { return (2 + (int64_t{1} << outer_shift)) * kPanelColumns; }
  int64_t panel_bytes(int64_t num_groups) const {
    if (dtype == DType::kInt8) return (num_groups >> outer_shift) * outer_bytes();
    return num_groups * kPanelColumns * static_cast<int64_t>(element_size(dtype));
  }
};

// out = x weight^T with the weight (value(code) * scale - min) of each group; see gemm_grouped.cpp.
struct GroupedLinearArgs {
  DType dtype, out_dtype, bias_dtype;
  const void* x;
  int64_t x_stride;
  const float* x_sums;    // [num_rows, num_groups]: the sum of each group of x; null without mins
  const float* x_scales;  // [num_rows, num_groups]: the scale of each group of x; null for one. Only without mins
  const uint8_t* panels;
  GroupNumbers scales, mins;
  const uint8_t* zeros;  // [num_panels, num_groups, 64], at most 16 for 4 bits; then value(code) = code - zero. Or null
  const float* table;    // [2^bits]: value(code); exact in bf16 for 8 bits. Null with zeros
  int64_t bits, group_size, num_groups;
  const void* bias;     // null for none; the gate's, then up's
  int64_t bias_stride;  // 0: one bias for all rows; else each row has one of floats, so far from the next
  int64_t factors;      // with biases of rows: how far behind a bias the factor of its sum is; 0: there are none
  void* out;
  int64_t out_stride;
  int64_t num_rows, num_columns, depth;
  bool gated;
  Activation activation;  // of the gate
  bool best;              // see LinearArgs
  const uint64_t* allowed;
};

// out[row][i] = x[row][order[i]], elements of 1, 2 or 4 bytes.
struct GatherColumnsArgs {
  const void* x;
  int64_t x_stride;
  const int32_t* order;  // [num_columns]
  void* out;             // [num_rows, num_columns]
  int64_t num_rows, num_columns, element_bytes;
};
void gather_columns(const GatherColumnsArgs& args);

struct SumGroupsArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  float* sums;  // [num_rows, number of groups]
  int64_t num_rows, depth, group_size;
};

}  // namespace shardline
