// Weights of codes in the tile registers of AMX, for groups of whole steps: see gemm_grouped.cpp. A panel is always
// unpacked, and the sum of a group is one of steps of 32 along K, see gemm_amx.h.
#pragma once

#include "gemm/code_unpacker.h"
#include "gemm/gemm_amx.h"
#include "gemm/gemm_chain.h"
#include "gemm/group_numbers.h"

#if defined(__AMX_BF16__)

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kStepOctets = 4;  // of K in a step of AMX

inline bool fits_amx(const GroupedLinearArgs& args) {
  return args.num_groups == 1 || args.group_size % (kStepOctets * kOctet) == 0;
}

// Scales the sums of group g, and adds them to those of the groups before. A row has both: first the total.
template <bool kMins>
void close_amx_group(const GroupedLinearArgs& args, const Tile& tile, int64_t g) {
  const NumbersOf<false> numbers(args, tile.panel, g, nullptr);
  numbers.template prefetch<kMins>();
  F32 scales[kPanelColumns / kLanes], mins[kPanelColumns / kLanes];
#pragma GCC unroll 4
  for (int64_t v = 0; v < kPanelColumns / kLanes; ++v) {
    scales[v] = numbers.scale_at(v * kLanes);
    if constexpr (kMins) mins[v] = -numbers.min_at(v * kLanes);
  }
  float* total = static_cast<float*>(tile.sums);
  for (int64_t r = 0; r < tile.rows; ++r, total += 2 * kPanelColumns) {
    const int64_t place = (tile.row + r) * args.num_groups + g;
    const F32 x_scale = broadcast(args.x_scales == nullptr ? 1.0f : args.x_scales[place]);
    [[maybe_unused]] const F32 x_sum = broadcast(kMins ? args.x_sums[place] : 0.0f);
#pragma GCC unroll 4
    for (int64_t v = 0; v < kPanelColumns / kLanes; ++v) {
      const F32 sum = load(total + kPanelColumns + v * kLanes) * x_scale;
      F32 value = fma(sum, scales[v], g == 0 ? F32{} : load(total + v * kLanes));
      if constexpr (kMins) value = fma(x_sum, mins[v], value);
      store(total + v * kLanes, value);
    }
  }
}

// Adds the octets of a block to the sums of a tile of rows; the tile's steps are unpacked.
inline void add_grouped_amx_tile(const GroupedLinearArgs& args, const Tile& tile) {
  const int64_t num_octets = ceil_div(args.depth, kOctet);
  const int64_t group_octets = args.num_groups == 1 ? num_octets : args.group_size / kOctet;
  const bf16* x = static_cast<const bf16*>(args.x) + tile.row * args.x_stride;
  for (int64_t begin = tile.begin, end; begin < tile.end; begin = end) {
    const int64_t g = begin / group_octets, group_end = min64((g + 1) * group_octets, num_octets);
    end = min64(group_end, tile.end);
    Tile part = tile;
    part.begin = begin * kOctet / 2;
    part.end = end * kOctet / 2;
    part.steps += (begin - tile.begin) * kUnpackedBytes<bf16, 1>;
    part.ahead += (begin - tile.begin) * tile.ahead_stride;
    part.ahead_stride = ceil_div(tile.ahead_stride, kOctet / 2);
    part.sums = static_cast<float*>(tile.sums) + kPanelColumns;
    add_amx_tile<Bf16Products>({reinterpret_cast<const char*>(x), args.x_stride * 2}, args.depth * 2, part,
                               begin == g * group_octets, 2 * kPanelColumns);
    if (end != group_end) return;
    args.mins.data != nullptr ? close_amx_group<true>(args, tile, g) : close_amx_group<false>(args, tile, g);
  }
}

template <class Unpacker>
void multiply_in_tiles(const GroupedLinearArgs& args, const CodeTables& tables) {
  const Unpacker unpacker(tables);
  const PanelLayout layout = {ceil_div(args.depth, kOctet), octet_bytes(args.bits), kUnpackedBytes<bf16, 1>,
                              2 * kPanelColumns, true};
  const auto add = [&](const Tile& tile) {
    Tile unpacked = tile;
    if (tile.unpacked != nullptr) {
      unpacker.unpack(args, tile);
      unpacked.steps = tile.unpacked;
    }
    add_grouped_amx_tile(args, unpacked);
  };
  using Sums = FloatSums<GroupedLinearArgs, 2 * kPanelColumns>;
  for_each_tile<AmxTiles<kStepOctets>>(args, layout, add, finish_of<Sums>(args));
}

}  // namespace shardline::SHARDLINE_ISA

#endif
