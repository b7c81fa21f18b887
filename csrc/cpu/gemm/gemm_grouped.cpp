// out[M, N] = x[M, K] weight[N, K]^T + bias for weights of codes with scales per group of columns:
//
//   the sum over groups, in order, of  scale * (sum over the group of x value(code)) - min * (sum over the group of x)
//
// The sum of a group is one chain of multiply-adds in the order of K, from zero. Its product with the scale is added
// with one rounding, and so is that with the min. All of it is in fp32. Values of codes are exact in bf16; those that
// are not are the sum of two bf16, which follow each other in the chain. If x is rounded to e4m3, a group's sum is first
// multiplied by the scale that the row of x has in this group. A few rows multiply codes that are decoded in
// registers; many rows multiply panels that are unpacked block by block. Both have the same bits.
#include <vector>

#include "gemm/code_decoder.h"
#include "gemm/gemm_chain.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kRowSums = 2 * kPanelColumns;  // of the groups before, then of the current group

// From this many rows on a panel is unpacked.
constexpr int64_t kUnpackRows = 13;

constexpr int kTileRows = kLanes == 16 ? 6 : 4;

// The scales or mins of a group.
class GroupRow {
 public:
  inline GroupRow(const GroupNumbers& numbers, int64_t num_groups, int64_t panel, int64_t g) : dtype_(numbers.dtype) {
    const char* first = static_cast<const char*>(numbers.data) + panel * numbers.panel_bytes(num_groups);
    if (dtype_ == DType::kInt8) {
      outer_ = first + (g >> numbers.outer_shift) * numbers.outer_bytes();
      const int64_t inner = g & ((int64_t{1} << numbers.outer_shift) - 1);
      row_ = outer_ + (2 + inner) * kPanelColumns;
    } else {
      row_ = first + g * kPanelColumns * static_cast<int64_t>(element_size(dtype_));
    }
  }

  [[gnu::always_inline]] inline F32 load_at(int64_t column) const {
    switch (dtype_) {
      case DType::kFloat32: return load(reinterpret_cast<const float*>(row_) + column);
      case DType::kBFloat16: return load(reinterpret_cast<const bf16*>(row_) + column);
      case DType::kInt8:
        return load_half(reinterpret_cast<const uint16_t*>(outer_) + column) *
               load(reinterpret_cast<const int8_t*>(row_) + column);
      default: return load_half(reinterpret_cast<const uint16_t*>(row_) + column);
    }
  }

  // Asks for what is `bytes` after the row.
  inline void prefetch(int64_t bytes) const {
    __builtin_prefetch(row_ + bytes);
    if (dtype_ != DType::kInt8) __builtin_prefetch(row_ + bytes + kCacheLine);
  }

 private:
  DType dtype_;
  const char* row_;
  const char* outer_ = nullptr;
};

// The scales and mins of the groups of a block of K, as float: [group][2][64]. Many tiles read them.
class BlockNumbers {
 public:
  // Expands those of the octets [begin, begin + count) of a panel.
  void expand(const GroupedLinearArgs& args, int64_t panel, int64_t begin, int64_t count) {
    const int64_t group_octets = args.group_size / kOctet, end = ceil_div(begin + count, group_octets);
    const int64_t first = begin / group_octets;
    values_.resize(static_cast<size_t>((end - first) * 2 * kPanelColumns));
    for (int64_t g = first; g < end; ++g) {
      float* to = values_.data() + (g - first) * 2 * kPanelColumns;
      expand_row(GroupRow(args.scales, args.num_groups, panel, g), to);
      if (args.mins.data != nullptr) expand_row(GroupRow(args.mins, args.num_groups, panel, g), to + kPanelColumns);
    }
  }

  // The numbers of the block's first group.
  const float* values() const { return values_.data(); }

 private:
  static void expand_row(const GroupRow& row, float* to) {
    for (int64_t column = 0; column < kPanelColumns; column += kLanes) {
      store(to + column, row.load_at(column));
    }
  }

  std::vector<float> values_;
};

thread_local BlockNumbers block_numbers;

// How far before its use memory of scales is asked for: a thread reads one stream of codes and some of scales, and a
// core's own prefetching ends at each page.
constexpr int64_t kAheadBytes = 1024;

// The scales and mins of group g, from the weight or expanded.
template <bool kExpanded>
class NumbersOf {
 public:
  inline NumbersOf(const GroupedLinearArgs& args, int64_t panel, int64_t g, const float*)
      : scales_(args.scales, args.num_groups, panel, g),
        mins_(args.mins.data != nullptr ? args.mins : args.scales, args.num_groups, panel, g) {}

  [[gnu::always_inline]] inline F32 scale_at(int64_t column) const { return scales_.load_at(column); }
  [[gnu::always_inline]] inline F32 min_at(int64_t column) const { return mins_.load_at(column); }
  template <bool kMins>
  inline void prefetch() const {
    scales_.prefetch(kAheadBytes);
    if (kMins) mins_.prefetch(kAheadBytes);
  }

 private:
  const GroupRow scales_, mins_;
};

template <>
class NumbersOf<true> {
 public:
  inline NumbersOf(const GroupedLinearArgs&, int64_t, int64_t, const float* expanded) : row_(expanded) {}

  inline F32 scale_at(int64_t column) const { return load(row_ + column); }
  inline F32 min_at(int64_t column) const { return load(row_ + kPanelColumns + column); }
  template <bool kMins>
  inline void prefetch() const {}

 private:
  const float* row_;
};

// Whether a tile holds the sums of the groups before in registers too. Then groups end without stores, each of which
// takes two cycles of a Zen 4.
constexpr bool holds_totals(int rows, int vectors) { return kLanes == 16 && rows * vectors <= 12; }

// Scales the sums of group g of kVectors vectors of columns from `column` on, and adds them to the sums of the groups
// before, in `total` if the tile holds them.
template <bool kMins, bool kExpanded, int kRows, int kVectors>
[[gnu::always_inline]] inline void close_group(const GroupedLinearArgs& args, const Tile& tile, int64_t g,
                                               int64_t column, const float* expanded, F32 (&total)[kRows][kVectors],
                                               F32 (&sum)[kRows][kVectors]) {
  constexpr bool kHeld = holds_totals(kRows, kVectors);
  const NumbersOf<kExpanded> numbers(args, tile.panel, g, expanded);
  if (column == 0) numbers.template prefetch<kMins>();
  float* sums = static_cast<float*>(tile.sums) + column;
  [[maybe_unused]] F32 x_sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; kMins && r < kRows; ++r) x_sums[r] = broadcast(args.x_sums[(tile.row + r) * args.num_groups + g]);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const F32 scale = numbers.scale_at(column + v * kLanes);
    const F32 min = kMins ? -numbers.min_at(column + v * kLanes) : F32{};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float* stored = sums + r * kRowSums + v * kLanes;
      F32 value = fma(sum[r][v], scale, kHeld ? total[r][v] : load(stored));
      if constexpr (kMins) value = fma(x_sums[r], min, value);
      if constexpr (kHeld) {
        total[r][v] = value;
      } else {
        store(stored, value);
      }
      sum[r][v] = F32{};
    }
  }
}

// Multiplies the sums of group g by the scales that x has in it.
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void scale_rows(const GroupedLinearArgs& args, int64_t row, int64_t g,
                                              F32 (&sum)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const F32 scale = broadcast(args.x_scales[(row + r) * args.num_groups + g]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = sum[r][v] * scale;
  }
}

// Calls add(g, begin, end, sum) for the octets of each group of a tile in turn, for kVectors vectors of columns from
// `column` on, and closes groups that are complete. With kExpanded, their scales and mins begin at `expanded`.
template <bool kExpanded, int kRows, int kVectors, class Add>
[[gnu::always_inline]] inline void for_each_group(const GroupedLinearArgs& args, const Tile& tile, int64_t column,
                                                  const float* expanded, const Add& add) {
  const int64_t num_octets = ceil_div(args.depth, kOctet), group_octets = args.group_size / kOctet;
  float* totals = static_cast<float*>(tile.sums) + column;
  float* current = totals + kPanelColumns;
  int64_t g = tile.begin / group_octets;
  const bool resumes = tile.begin != g * group_octets, has_mins = args.mins.data != nullptr;
  constexpr bool kHeld = holds_totals(kRows, kVectors);
  F32 sum[kRows][kVectors], total[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = resumes ? load(current + r * kRowSums + v * kLanes) : F32{};
      float* stored = totals + r * kRowSums + v * kLanes;
      if (kHeld) {
        total[r][v] = tile.begin == 0 ? F32{} : load(stored);
      } else if (tile.begin == 0) {
        store(stored, F32{});
      }
    }
  }
  for (int64_t begin = tile.begin; begin < tile.end; ++g) {
    const int64_t group_end = min64((g + 1) * group_octets, num_octets), end = min64(group_end, tile.end);
    add(g, begin, end, sum);
    begin = end;
    if (end != group_end) break;
    if (args.x_scales != nullptr) scale_rows(args, tile.row, g, sum);
    has_mins ? close_group<true, kExpanded>(args, tile, g, column, expanded, total, sum)
             : close_group<false, kExpanded>(args, tile, g, column, expanded, total, sum);
    if (kExpanded) expanded += 2 * kPanelColumns;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if (kHeld) store(totals + r * kRowSums + v * kLanes, total[r][v]);
      store(current + r * kRowSums + v * kLanes, sum[r][v]);
    }
  }
}

// Where codes lie: the panel, and the octet in it.
struct Place {
  int64_t panel, octet;
};
inline Place place_of(const GroupedLinearArgs& args, const char* steps) {
  const int64_t num_octets = ceil_div(args.depth, kOctet);
  const int64_t octet = (reinterpret_cast<const uint8_t*>(steps) - args.panels) / octet_bytes(args.bits);
  return {octet / num_octets, octet % num_octets};
}

// The entry of the tables for a zero point is this many above the code.
inline int entry_offset(const GroupedLinearArgs& args, Place place, int64_t column) {
  if (args.zeros == nullptr) return 0;
  const int64_t group = place.panel * args.num_groups + place.octet * kOctet / args.group_size;
  return zero_entry(args.bits) - args.zeros[group * kPanelColumns + column];
}

// Unpacks to the panels of a GEMM in fp32.
struct FloatUnpacker {
  using T = float;
  static constexpr int kNumParts = 1;
  static constexpr int64_t kOctetBytes = kOctet * kPanelColumns * 4;

  static void unpack(const GroupedLinearArgs& args, const CodeTables& tables, const uint8_t* octet, Place place,
                     char* to) {
    float* out = reinterpret_cast<float*>(to);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const float* values = tables.values + entry_offset(args, place, c);
      for (int64_t k = 0; k < kOctet; ++k) out[k * kPanelColumns + c] = values[code_at(octet, args.bits, c, k)];
    }
  }
};

// Unpacks to the panels of a GEMM in bf16, with kParts rows for each pair of k.
template <int kParts>
struct PairUnpacker {
  using T = bf16;
  static constexpr int kNumParts = kParts;
  static constexpr int64_t kOctetBytes = kOctet * kPanelColumns * 2 * kParts;

  static void unpack(const GroupedLinearArgs& args, const CodeTables& tables, const uint8_t* octet, Place place,
                     char* to) {
    uint16_t* out = reinterpret_cast<uint16_t*>(to);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const int offset = entry_offset(args, place, c);
      for (int64_t k = 0; k < kOctet; ++k) {
        const int entry = code_at(octet, args.bits, c, k) + offset;
        for (int part = 0; part < kParts; ++part) {
          out[((k / 2 * kParts + part) * kPanelColumns + c) * 2 + k % 2] = tables.parts[part][entry];
        }
      }
    }
  }
};

#if defined(__AVX512BW__)

// The offsets of 16 columns that a decoder takes.
template <class Decoder>
inline I32 load_offsets(const GroupedLinearArgs& args, int64_t group, int64_t column) {
  if constexpr (Decoder::kHasZeros) {
    const uint8_t* zeros = args.zeros + group * kPanelColumns + column;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    return Decoder::offsets((I32)_mm512_maskz_cvtepu8_epi32(0xffff, bytes));
  } else {
    return I32{};
  }
}

// As PairUnpacker, 32 values at a time.
template <class Decoder>
struct FastUnpacker {
  using T = bf16;
  static constexpr int kNumParts = Decoder::kNumParts;
  static constexpr int64_t kOctetBytes = kOctet * kPanelColumns * 2 * kNumParts;

  static void unpack(const GroupedLinearArgs& args, const CodeTables& tables, const uint8_t* octet, Place place,
                     char* to) {
    const Decoder decoder(tables);
    const int64_t group = place.panel * args.num_groups + place.octet * kOctet / args.group_size;
#pragma GCC unroll 4
    for (int64_t v = 0; v < kPanelColumns / kLanes; ++v) {
      I32 pairs[4 * kNumParts];
      decoder.decode(octet, v, load_offsets<Decoder>(args, group, v * kLanes), pairs);
#pragma GCC unroll 8
      for (int i = 0; i < 4 * kNumParts; ++i) _mm512_store_si512(to + i * 256 + v * 64, (__m512i)pairs[i]);
    }
  }
};

// Asks for an octet some way ahead, which may be another panel's. The core's own prefetching is slower than decoding.
template <int64_t kBits>
inline void prefetch_octet(const uint8_t* octet) {
  constexpr int64_t kDistance = 2048;
  for (int64_t line = 0; line < octet_bytes(kBits); line += kCacheLine) __builtin_prefetch(octet + kDistance + line);
}

// How many vectors of columns a tile of `rows` holds in registers, beside the decoder's tables.
template <class Decoder>
constexpr int direct_vectors(int rows) {
  return rows <= (Decoder::kBits == 4 && Decoder::kNumParts == 1 ? 6 : 4) ? 4 : 2;
}

template <class Decoder, int kRows>
void add_decoded_tile(const GroupedLinearArgs& args, const Decoder& decoder, const Tile& tile) {
  constexpr int kVectors = direct_vectors<Decoder>(kRows), kParts = Decoder::kNumParts;
  const bf16* x = static_cast<const bf16*>(args.x) + tile.row * args.x_stride;
  const int64_t whole = args.depth / kOctet;
  bf16 padded[kRows][kOctet] = {};  // the end of each row, if K ends within an octet
  for (int r = 0; r < kRows && args.depth % kOctet != 0; ++r) {
    __builtin_memcpy(padded[r], x + r * args.x_stride + whole * kOctet, static_cast<size_t>(args.depth % kOctet) * 2);
  }
  const auto* octets = reinterpret_cast<const uint8_t*>(tile.steps);
  Ahead ahead(tile, kPanelColumns / (kVectors * kLanes));
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    const auto add = [&]([[maybe_unused]] int64_t g, int64_t begin, int64_t end, auto& sum) {
      I32 offsets[kVectors] = {};
      if constexpr (Decoder::kHasZeros) {
        const int64_t group = tile.panel * args.num_groups + g;
        for (int v = 0; v < kVectors; ++v) offsets[v] = load_offsets<Decoder>(args, group, column + v * kLanes);
      }
      for (int64_t o = begin; o < end; ++o) {
        if (asks_ahead(kRows, false)) ahead.request();
        const uint8_t* octet = octets + (o - tile.begin) * octet_bytes(Decoder::kBits);
        if constexpr (kRows < 3) prefetch_octet<Decoder::kBits>(octet);
        const bf16* row = o < whole ? x + o * kOctet : padded[0];
        const int64_t stride = o < whole ? args.x_stride : kOctet;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          I32 pairs[4 * kParts];
          decoder.decode(octet, column / kLanes + v, offsets[v], pairs);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < 4 * kParts; ++i) {
              sum[r][v] = dot_pairs(sum[r][v], broadcast_pair(row + r * stride + i / kParts * 2), pairs[i]);
            }
          }
        }
      }
    };
    for_each_group<false, kRows, kVectors>(args, tile, column, nullptr, add);
  }
}

#endif

// The scales of a weight that is unpacked: as they are stored, expanded for a block of K, or one a row. The last need no
// registers for sums of groups, so a tile is wider.
enum class Numbers { kStored, kExpanded, kOfRows };

template <class Unpacker, Numbers kNumbers, int kRows>
void add_unpacked_tile(const GroupedLinearArgs& args, const Tile& tile) {
  using T = typename Unpacker::T;
  constexpr bool kExpanded = kNumbers == Numbers::kExpanded;
  constexpr int kVectors = kLanes < 16 ? (kRows == 1 ? 8 : 2) : kNumbers == Numbers::kOfRows ? 4 : 2;
  constexpr int kParts = Unpacker::kNumParts;
  constexpr int64_t kSteps = kOctet / kStep<T>;
  const T* x = static_cast<const T*>(args.x) + tile.row * args.x_stride;
  Ahead ahead(tile, kSteps * kParts * (kPanelColumns / (kVectors * kLanes)));
  // The loop below would call a function for a variable of the thread, and so spill its sums.
  const float* expanded = kExpanded ? block_numbers.values() : nullptr;
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    const auto add = [&](int64_t, int64_t begin, int64_t end, auto& sum) {
      const T* w = reinterpret_cast<const T*>(tile.steps + (begin - tile.begin) * Unpacker::kOctetBytes);
      const int64_t last = min64(end * kSteps, ceil_div(args.depth, kStep<T>));
      accumulate<asks_ahead(kRows, false), kParts>(x, args.x_stride, w + column * kStep<T>, begin * kSteps, last,
                                                   args.depth, ahead, sum);
    };
    for_each_group<kExpanded, kRows, kVectors>(args, tile, column, expanded, add);
  }
}

template <class Unpacker, Numbers kNumbers>
void multiply_blocks(const GroupedLinearArgs& args, const CodeTables& tables) {
  PanelLayout layout = {ceil_div(args.depth, kOctet), octet_bytes(args.bits), Unpacker::kOctetBytes, kRowSums};
  const auto unpack = [&](const char* steps, int64_t count, void* to) {
    Place place = place_of(args, steps);
    const int64_t bytes = octet_bytes(args.bits);
    if (kNumbers == Numbers::kExpanded) block_numbers.expand(args, place.panel, place.octet, count);
    for (int64_t o = 0; o < count; ++o, ++place.octet) {
      Unpacker::unpack(args, tables, reinterpret_cast<const uint8_t*>(steps) + o * bytes, place,
                       static_cast<char*>(to) + o * Unpacker::kOctetBytes);
    }
  };
  const auto add = [&](const Tile& tile, auto rows, auto) {
    add_unpacked_tile<Unpacker, kNumbers, rows.kValue>(args, tile);
  };
  for_each_tile<kTileRows, 1, 0>(args, layout, add, finish_of<FloatSums<GroupedLinearArgs, kRowSums>>(args), unpack);
}

// Two levels of scales are expanded once a block, since many tiles would multiply them again.
template <class Unpacker>
void multiply_unpacked(const GroupedLinearArgs& args, const CodeTables& tables) {
  if (args.scales.dtype == DType::kInt8) return multiply_blocks<Unpacker, Numbers::kExpanded>(args, tables);
  if (args.num_groups == 1) return multiply_blocks<Unpacker, Numbers::kOfRows>(args, tables);
  multiply_blocks<Unpacker, Numbers::kStored>(args, tables);
}

#if defined(__AVX512BW__)

template <class Decoder>
void multiply_codes(const GroupedLinearArgs& args, const CodeTables& tables) {
  if (args.num_rows >= kUnpackRows) return multiply_unpacked<FastUnpacker<Decoder>>(args, tables);
  const Decoder decoder(tables);
  const PanelLayout layout = {ceil_div(args.depth, kOctet), octet_bytes(args.bits), 0, kRowSums};
  const auto add = [&](const Tile& tile, auto rows, auto) {
    add_decoded_tile<Decoder, rows.kValue>(args, decoder, tile);
  };
  for_each_tile<kTileRows, 1, 0>(args, layout, add, finish_of<FloatSums<GroupedLinearArgs, kRowSums>>(args));
}

#endif

template <class T>
void sum_groups_of(const SumGroupsArgs& args) {
  const int64_t num_groups = ceil_div(args.depth, args.group_size);
  constexpr int64_t kManyRows = 16;
  parallel_for_if(args.num_rows >= kManyRows, args.num_rows, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t end = min64((g + 1) * args.group_size, args.depth);
      F32 sum = {};
      for (int64_t k = g * args.group_size; k < end; k += kLanes) sum = sum + load_n(x + k, end - k);
      args.sums[row * num_groups + g] = sum_lanes(sum);
    }
  });
}

}  // namespace

void linear_grouped(const GroupedLinearArgs& args) {
  const CodeTables tables(args);
  if (args.dtype == DType::kFloat32) return multiply_unpacked<FloatUnpacker>(args, tables);
  const bool two = tables.num_parts == 2;
#if defined(__AVX512BW__)
  if (args.bits == 8 && args.zeros != nullptr) return multiply_codes<ZeroByteDecoder>(args, tables);
  if (args.zeros != nullptr) return multiply_codes<NibbleDecoder<true, 1>>(args, tables);
  if (args.bits == 4 && two) return multiply_codes<NibbleDecoder<false, 2>>(args, tables);
  if (args.bits == 4) return multiply_codes<NibbleDecoder<false, 1>>(args, tables);
#endif
#if defined(__AVX512VBMI__)
  if (!two && tables.is_signed) return multiply_codes<ByteDecoder<true>>(args, tables);
  if (!two) return multiply_codes<ByteDecoder<false>>(args, tables);
#endif
  two ? multiply_unpacked<PairUnpacker<2>>(args, tables) : multiply_unpacked<PairUnpacker<1>>(args, tables);
}

void sum_groups(const SumGroupsArgs& args) {
  args.dtype == DType::kFloat32 ? sum_groups_of<float>(args) : sum_groups_of<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
