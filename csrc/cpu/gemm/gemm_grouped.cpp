// out[M, N] = x[M, K] weight[N, K]^T + bias for weights of codes with scales per group of columns:
//
//   the sum over groups, in order, of  scale * (sum over the group of x value(code)) - min * (sum over the group of x)
//
// The sum of a group is one chain of multiply-adds in the order of K, from zero. Its product with the scale is added
// with one rounding, and so is that with the min. All of it is in fp32. Values of codes are exact in bf16; those that
// are not are the sum of two bf16, which follow each other in the chain. If x is rounded to e4m3, a group's sum is
// first multiplied by the scale that the row of x has in this group. A few rows multiply codes that are decoded in
// registers; many rows multiply panels that are unpacked block by block. Both have the same bits.
// With AMX, groups of whole steps are summed as gemm_grouped_amx.h says.
#include "gemm/code_decoder.h"
#include "gemm/code_unpacker.h"
#include "gemm/gemm_chain.h"
#include "gemm/gemm_grouped_amx.h"
#include "gemm/group_numbers.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kRowSums = 2 * kPanelColumns;  // of the groups before, then of the current group

constexpr int kTileRows = kLanes == 16 ? 6 : 4;
// From this many rows on a panel is unpacked. They are cut evenly into tiles, which have so many rows at least.
constexpr int kUnpackRows = kLanes == 16 ? 13 : 5, kLeastUnpackedRows = kLanes == 16 ? 4 : 2;

thread_local BlockNumbers block_numbers;

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
  bool open = false;  // whether the tile ends within a group
  for (int64_t begin = tile.begin; begin < tile.end; ++g) {
    const int64_t group_end = min64((g + 1) * group_octets, num_octets), end = min64(group_end, tile.end);
    add(g, begin, end, sum);
    begin = end;
    if (end != group_end) {
      open = true;
      break;
    }
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
      if (open) store(current + r * kRowSums + v * kLanes, sum[r][v]);
    }
  }
}

#if defined(__AVX2__)

// Asks for an octet some way ahead, which may be another panel's. The core's own prefetching is slower than decoding.
template <int64_t kBits>
inline void prefetch_octet(const uint8_t* octet) {
  constexpr int64_t kDistance = 2048;
  for (int64_t line = 0; line < octet_bytes(kBits); line += kCacheLine) __builtin_prefetch(octet + kDistance + line);
}

// How many vectors of columns a tile of `rows` holds in registers, beside the decoder's tables.
template <class Decoder>
constexpr int direct_vectors(int rows) {
  if (kLanes < 16) return rows == 1 ? 4 : 2;
  return rows <= (Decoder::kBits == 4 && Decoder::kNumParts == 1 ? 6 : 4) ? 4 : 2;
}

// How many vectors of columns are decoded before they are multiplied, as far as the registers suffice. They share the
// broadcasts of x, and their chains of sums overlap.
template <class Decoder>
constexpr int decoded_together(int rows, int vectors) {
  if (kLanes < 16) return 1;
  return rows == 1 && Decoder::kBits == 4 ? vectors : vectors == 2 ? 2 : 1;
}

// With kUnpacks, the pairs are also stored for the tiles that follow. Storing takes long, so it is best done while sums
// are computed.
template <bool kUnpacks, bool kExpanded, int kVectors, int kRows, class Decoder>
void add_decoded_tile(const GroupedLinearArgs& args, const Decoder& decoder, const Tile& tile) {
  constexpr int kParts = Decoder::kNumParts, kTogether = decoded_together<Decoder>(kRows, kVectors);
  const float* expanded = kExpanded ? block_numbers.values() : nullptr;
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
#pragma GCC unroll 2
        for (int step = 0; step < kOctet / 2; step += kSteps) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v += kTogether) {
            I32 pairs[kTogether][kSteps * kParts];
#pragma GCC unroll 4
            for (int t = 0; t < kTogether; ++t) {
              decoder.decode(octet, column / kLanes + v + t, offsets[v + t], step, pairs[t]);
              if constexpr (kUnpacks) {
                char* to = tile.unpacked + (o - tile.begin) * kUnpackedBytes<bf16, kParts>;
                FastUnpacker<bf16, Decoder>::write(pairs[t], step, to + (column + (v + t) * kLanes) * 4);
              }
            }
#pragma GCC unroll 8
            for (int i = 0; i < kSteps * kParts; ++i) {
#pragma GCC unroll 8
              for (int r = 0; r < kRows; ++r) {
                const I32 x_pair = broadcast_pair(row + r * stride + (step + i / kParts) * 2);
#pragma GCC unroll 4
                for (int t = 0; t < kTogether; ++t) sum[r][v + t] = dot_pairs(sum[r][v + t], x_pair, pairs[t][i]);
              }
            }
          }
        }
      }
    };
    for_each_group<kExpanded, kRows, kVectors>(args, tile, column, expanded, add);
  }
}

#endif

// The scales of a weight that is unpacked: as they are stored, expanded for a block of K, or one a row. The last need
// no registers for sums of groups, so a tile is wider.
enum class Numbers { kStored, kExpanded, kOfRows };

template <class T, int kParts, Numbers kNumbers, int kRows>
void add_unpacked_tile(const GroupedLinearArgs& args, const Tile& tile) {
  constexpr bool kExpanded = kNumbers == Numbers::kExpanded;
  constexpr int kVectors = kLanes < 16 ? (kRows == 1 ? 8 : 2) : kNumbers == Numbers::kOfRows ? 4 : 2;
  constexpr int64_t kSteps = kOctet / kStep<T>;
  const T* x = static_cast<const T*>(args.x) + tile.row * args.x_stride;
  Ahead ahead(tile, kSteps * kParts * (kPanelColumns / (kVectors * kLanes)));
  // The loop below would call a function for a variable of the thread, and so spill its sums.
  const float* expanded = kExpanded ? block_numbers.values() : nullptr;
  for (int64_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    const auto add = [&](int64_t, int64_t begin, int64_t end, auto& sum) {
      const T* w = reinterpret_cast<const T*>(tile.steps + (begin - tile.begin) * kUnpackedBytes<T, kParts>);
      const int64_t last = min64(end * kSteps, ceil_div(args.depth, kStep<T>));
      accumulate<asks_ahead(kRows, false), kParts>(x, args.x_stride, w + column * kStep<T>, begin * kSteps, last,
                                                   args.depth, ahead, sum);
    };
    for_each_group<kExpanded, kRows, kVectors>(args, tile, column, expanded, add);
  }
}

// The first tile of a block: it unpacks the block, and multiplies.
template <class Unpacker, Numbers kNumbers, int kRows>
void add_first_tile(const GroupedLinearArgs& args, const Unpacker& unpacker, const Tile& tile) {
  if (kNumbers == Numbers::kExpanded) block_numbers.expand(args, tile.panel, tile.begin, tile.end - tile.begin);
#if defined(__AVX2__)
  if constexpr (Unpacker::kDecodesFirstTile && kRows >= kLeastUnpackedRows) {
    constexpr bool kExpanded = kNumbers == Numbers::kExpanded;
    return add_decoded_tile<true, kExpanded, 2, kRows>(args, unpacker.decoder(), tile);
  }
#endif
  unpacker.unpack(args, tile);
  Tile unpacked = tile;
  unpacked.steps = tile.unpacked;
  add_unpacked_tile<typename Unpacker::T, Unpacker::kNumParts, kNumbers, kRows>(args, unpacked);
}

template <class Unpacker, Numbers kNumbers>
void multiply_blocks(const GroupedLinearArgs& args, const Unpacker& unpacker) {
  using T = typename Unpacker::T;
  constexpr int kParts = Unpacker::kNumParts;
  const PanelLayout layout = {ceil_div(args.depth, kOctet), octet_bytes(args.bits), kUnpackedBytes<T, kParts>, kRowSums,
                              true};
  const auto add = [&](const Tile& tile, auto rows, auto) {
    if (tile.unpacked != nullptr) return add_first_tile<Unpacker, kNumbers, rows.kValue>(args, unpacker, tile);
    add_unpacked_tile<T, kParts, kNumbers, rows.kValue>(args, tile);
  };
  for_each_tile<ConstantTiles<kTileRows, 1, 0>>(args, layout, add,
                                                finish_of<FloatSums<GroupedLinearArgs, kRowSums>>(args));
}

// Two levels of scales are expanded once a block, since many tiles would multiply them again.
template <class Unpacker>
void multiply_unpacked(const GroupedLinearArgs& args, const CodeTables& tables) {
  const Unpacker unpacker(tables);
  if (args.scales.dtype == DType::kInt8) return multiply_blocks<Unpacker, Numbers::kExpanded>(args, unpacker);
  if (args.num_groups == 1) return multiply_blocks<Unpacker, Numbers::kOfRows>(args, unpacker);
  multiply_blocks<Unpacker, Numbers::kStored>(args, unpacker);
}

void multiply_any_codes(const GroupedLinearArgs& args, const CodeTables& tables) {
  if (args.dtype == DType::kFloat32) return multiply_unpacked<AnyUnpacker<float, 1>>(args, tables);
  if (tables.num_parts == 2) return multiply_unpacked<AnyUnpacker<bf16, 2>>(args, tables);
#if defined(__AMX_BF16__)
  if (fits_amx(args)) return multiply_in_tiles<AnyUnpacker<bf16, 1>>(args, tables);
#endif
  multiply_unpacked<AnyUnpacker<bf16, 1>>(args, tables);
}

#if defined(__AVX2__)

template <class Decoder>
void multiply_codes(const GroupedLinearArgs& args, const CodeTables& tables) {
  if (args.dtype == DType::kFloat32) {
    if constexpr (Decoder::kNumParts == 1) return multiply_unpacked<FastUnpacker<float, Decoder>>(args, tables);
    return multiply_any_codes(args, tables);
  }
#if defined(__AMX_BF16__)
  if constexpr (Decoder::kNumParts == 1) {
    if (fits_amx(args)) return multiply_in_tiles<FastUnpacker<bf16, Decoder>>(args, tables);
  }
#endif
  if (args.num_rows >= kUnpackRows) return multiply_unpacked<FastUnpacker<bf16, Decoder>>(args, tables);
  const Decoder decoder(tables);
  const PanelLayout layout = {ceil_div(args.depth, kOctet), octet_bytes(args.bits), 0, kRowSums};
  const auto add = [&](const Tile& tile, auto rows, auto) {
    add_decoded_tile<false, false, direct_vectors<Decoder>(rows.kValue), rows.kValue>(args, decoder, tile);
  };
  for_each_tile<ConstantTiles<kTileRows, 1, 0>>(args, layout, add,
                                                finish_of<FloatSums<GroupedLinearArgs, kRowSums>>(args));
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
  [[maybe_unused]] const bool has_zeros = args.zeros != nullptr, two = tables.num_parts == 2;
#if defined(__AVX2__)
  if (args.bits == 4 && has_zeros) return multiply_codes<NibbleDecoder<true, 1>>(args, tables);
  if (args.bits == 4 && two) return multiply_codes<NibbleDecoder<false, 2>>(args, tables);
  if (args.bits == 4) return multiply_codes<NibbleDecoder<false, 1>>(args, tables);
#endif
#if defined(__AVX512BW__)
  if (args.bits == 6 && !has_zeros && !two) return multiply_codes<SixBitDecoder>(args, tables);
#elif defined(__AVX2__)
  if (args.bits == 6 && !has_zeros && tables.is_integers()) return multiply_codes<IntegerSixBitDecoder>(args, tables);
#endif
#if defined(__AVX2__)
  if (args.bits == 8 && has_zeros) return multiply_codes<IntegerByteDecoder<true>>(args, tables);
#endif
#if defined(__AVX512VBMI__)
  if (args.bits == 8 && !two && tables.is_signed) return multiply_codes<ByteDecoder<true>>(args, tables);
  if (args.bits == 8 && !two) return multiply_codes<ByteDecoder<false>>(args, tables);
#elif defined(__AVX2__)
  if (args.bits == 8 && tables.is_integers()) return multiply_codes<IntegerByteDecoder<false>>(args, tables);
  if (args.bits == 8 && tables.is_e4m3()) return multiply_codes<E4m3Decoder>(args, tables);
#endif
  multiply_any_codes(args, tables);
}

void sum_groups(const SumGroupsArgs& args) {
  args.dtype == DType::kFloat32 ? sum_groups_of<float>(args) : sum_groups_of<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
